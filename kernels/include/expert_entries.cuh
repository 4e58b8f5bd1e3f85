// Which table entry each row of a MoE block takes: (adapter of its token, its expert).
#pragma once

#include "params.cuh"
#include "primitives.cuh"

// Asks for the lines of a list of 32-bit numbers, a thread of the grid each.
__device__ __forceinline__ void prefetch_list(uint64_t list, uint32_t length) {
    constexpr uint32_t kNumbersALine = kLineBytes / sizeof(uint32_t);
    const uint32_t threads = gridDim.x * blockDim.x;
    for (uint64_t at = blockIdx.x * blockDim.x + threadIdx.x; at * kNumbersALine < length; at += threads) prefetch_l2(list + at * kLineBytes);
}

// A source of entries for the grouping of rows.
struct ExpertSource {
    // Experts' bounds that a block keeps in shared memory: those of 511 experts, which a search then finds in nine short steps.
    static constexpr uint32_t kKeptBounds = 512;

    const EntryParams& p;
    uint32_t* kept;

    __device__ __forceinline__ bool sorted() const { return p.experts == 0; }

    __device__ __forceinline__ void prefetch(uint32_t rows) const {
        prefetch_list(sorted() ? p.tokens : p.experts, rows);
        prefetch_list(p.adapters, p.token_count);
        prefetch_list(p.resident_of_slot, p.slots);
        if (sorted()) prefetch_list(p.offsets, p.num_experts + 1);
    }

    __device__ __forceinline__ void prepare() {
        if (!sorted() || p.num_experts >= kKeptBounds) return;
        const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.offsets);
        for (uint32_t i = threadIdx.x; i <= p.num_experts; i += blockDim.x) kept[i] = __ldcg(offsets + i);
        __syncthreads();
    }

    // The expert whose rows hold `row`: one less than how many bounds are at or before it. Bounds do not decrease; an expert without rows
    // shares both of its bounds. Before the first bound the result is -1, from the last on it is `num_experts`.
    __device__ __forceinline__ uint32_t expert_of_sorted(uint32_t row) const {
        const uint32_t* offsets = reinterpret_cast<const uint32_t*>(p.offsets);
        const bool is_kept = p.num_experts < kKeptBounds;
        uint32_t low = 0;
        uint32_t high = p.num_experts + 1;
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            const uint32_t bound = is_kept ? kept[middle] : __ldcg(offsets + middle);
            if (bound <= row) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low - 1;
    }

    // Negative numbers are past every limit once they are unsigned; past one, the entry is past the last. Loads are clamped rather than branched
    // around, so that those of several rows are in flight together.
    __device__ __forceinline__ uint32_t entry_of(uint32_t row) const {
        const bool is_sorted = sorted();
        const uint32_t said = __ldcg(reinterpret_cast<const uint32_t*>(is_sorted ? p.tokens : p.experts) + row);
        const uint32_t token = is_sorted ? said : row / p.top_k;
        const uint32_t slot = __ldcg(reinterpret_cast<const uint32_t*>(p.adapters) + min(token, p.token_count - 1));
        const uint32_t resident = __ldcg(reinterpret_cast<const uint32_t*>(p.resident_of_slot) + min(slot, p.slots - 1));
        const uint32_t expert = is_sorted ? expert_of_sorted(row) : said;
        const bool found = token < p.token_count & slot < p.slots & resident < p.residents & expert < p.num_experts;
        return found ? resident * p.num_experts + expert : ~0u;
    }
};
