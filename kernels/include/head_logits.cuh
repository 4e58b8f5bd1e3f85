// Where logits of an item of the head go, and how they are stored.
#pragma once

#include "overlay_work.cuh"

__device__ __forceinline__ void store_logit(const LogitsParams& p, uint64_t at, float value) {
    if (p.flags & kFlagF32Logits) {
        reinterpret_cast<float*>(p.logits)[at] = value;
    } else {
        reinterpret_cast<__nv_bfloat16*>(p.logits)[at] = __float2bfloat16_rn(value);
    }
}

// Where a thread stores logits: lanes take neighbouring ids, so that a whole table's are stored together, and `kWarps` warps rows, this one `kCount` of them.
// Loads are not branched around, so that they are under way together.
template <int kIdsALane, int kWarps, int kCount>
struct LogitPlaces {
    static constexpr uint32_t kNone = ~0u;

    uint32_t ids[kIdsALane];
    uint32_t rows[kCount];

    __device__ __forceinline__ void find_ids(const LogitsParams& p, const HeadItem& item) {
#pragma unroll
        for (int i = 0; i < kIdsALane; ++i) {
            const uint32_t column = i * 32 + threadIdx.x % 32;
            const uint32_t id = load_u32(reinterpret_cast<const uint32_t*>(item.ids) + min(column, item.id_count - 1));
            ids[i] = column < item.id_count && id < p.vocab ? id : kNone;
        }
    }

    // For every `kWarps`th row of the item from `from` to before `end`.
    __device__ __forceinline__ void find_rows(const LogitsParams& p, const HeadItem& item, uint32_t from, uint32_t end) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const uint32_t at = from + j * kWarps;
            const uint32_t row = head_row(p, item.first_position + min(at, item.count - 1));
            rows[j] = at < end && row < p.rows ? row : kNone;
        }
    }

    // Stores there; `value(row, id)` is a logit of the item.
    template <typename Value>
    __device__ __forceinline__ void store(const LogitsParams& p, uint32_t from, Value value) const {
        float logit[kCount][kIdsALane];
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
#pragma unroll
            for (int i = 0; i < kIdsALane; ++i) logit[j][i] = value(from + j * kWarps, i * 32 + threadIdx.x % 32);
        }
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
            const uint64_t start = rows[j] * p.logits_stride;
#pragma unroll
            for (int i = 0; i < kIdsALane; ++i) {
                if (rows[j] != kNone && ids[i] != kNone) store_logit(p, start + ids[i], logit[j][i]);
            }
        }
    }
};
