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

// A source of entries for the grouping of rows. What a block's rows need of small tables lies in shared memory, on its way together with the rows' own numbers.
struct ExpertSource {
    // Experts' bounds that a block keeps: those of 511 experts, which a search then finds in nine short steps.
    static constexpr uint32_t kKeptBounds = 512;
    // Slots whose residents it keeps.
    static constexpr uint32_t kKeptResidents = 256;

    struct Kept {
        uint32_t bounds[kKeptBounds];
        uint32_t residents[kKeptResidents];
    };

    // What is read of a row.
    struct Asked {
        uint32_t row;
        uint32_t token;
        uint32_t said;  // its expert, or its token where rows are sorted
        uint32_t slot;
    };

    const EntryParams& p;
    Kept& kept;
    uint32_t own_resident;  // the thread's, on their way to the others
    uint32_t own_bound;

    __device__ __forceinline__ ExpertSource(const EntryParams& p, Kept& kept) : p(p), kept(kept) {}

    __device__ __forceinline__ bool sorted() const { return p.experts == 0; }
    __device__ __forceinline__ bool keeps_bounds() const { return sorted() && p.num_experts < kKeptBounds; }
    __device__ __forceinline__ bool keeps_residents() const { return p.slots <= min(blockDim.x, kKeptResidents); }

    __device__ __forceinline__ void prefetch(uint32_t rows) const {
        prefetch_list(sorted() ? p.tokens : p.experts, rows);
        prefetch_list(p.adapters, p.token_count);
        prefetch_list(p.resident_of_slot, p.slots);
        if (sorted()) prefetch_list(p.offsets, p.num_experts + 1);
    }

    __device__ __forceinline__ uint32_t resident_of(uint32_t slot) const {
        return __ldcg(reinterpret_cast<const uint32_t*>(p.resident_of_slot) + min(slot, p.slots - 1));
    }

    __device__ __forceinline__ uint32_t bound_of(uint32_t expert) const { return __ldcg(reinterpret_cast<const uint32_t*>(p.offsets) + expert); }

    // Asks for the tables.
    __device__ __forceinline__ void prepare() {
        own_resident = resident_of(threadIdx.x);
        own_bound = keeps_bounds() ? bound_of(min(threadIdx.x, p.num_experts)) : 0;
    }

    // Called by all threads, once rows have been asked for.
    __device__ __forceinline__ void settle() {
        if (threadIdx.x < kKeptResidents) kept.residents[threadIdx.x] = own_resident;
        if (keeps_bounds()) {
            if (threadIdx.x <= p.num_experts) kept.bounds[threadIdx.x] = own_bound;
            for (uint32_t i = threadIdx.x + blockDim.x; i <= p.num_experts; i += blockDim.x) kept.bounds[i] = bound_of(i);
        }
        __syncthreads();
    }

    // The expert whose rows hold `row`: one less than how many bounds are at or before it. Bounds do not decrease; an expert without rows
    // shares both of its bounds. Before the first bound the result is -1, from the last on it is `num_experts`.
    __device__ __forceinline__ uint32_t expert_of_sorted(uint32_t row) const {
        const bool is_kept = keeps_bounds();
        uint32_t low = 0;
        uint32_t high = p.num_experts + 1;
        while (low < high) {
            const uint32_t middle = low + (high - low) / 2;
            const uint32_t bound = is_kept ? kept.bounds[middle] : bound_of(middle);
            if (bound <= row) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low - 1;
    }

    __device__ __forceinline__ uint32_t slot_of(uint32_t token) const {
        return __ldcg(reinterpret_cast<const uint32_t*>(p.adapters) + min(token, p.token_count - 1));
    }

    // What is known of a row before the wait.
    __device__ __forceinline__ Asked find(uint32_t row) const { return Asked{row, row / p.top_k, 0, 0}; }

    // Loads are clamped rather than branched around, so that those of several rows are in flight together, and so are a row's: where rows are sorted, the slot
    // that is read here is another token's.
    __device__ __forceinline__ void ask(Asked& asked) const {
        asked.slot = slot_of(asked.token);
        asked.said = __ldcg(reinterpret_cast<const uint32_t*>(sorted() ? p.tokens : p.experts) + asked.row);
    }

    // What is read by what has been; called once all rows have been asked for.
    __device__ __forceinline__ void follow(Asked& asked) const {
        if (!sorted()) return;
        asked.token = asked.said;
        asked.slot = slot_of(asked.token);
    }

    // Negative numbers are past every limit once they are unsigned; past one, the entry is past the last.
    __device__ __forceinline__ uint32_t entry_of(const Asked& asked) const {
        const uint32_t resident = keeps_residents() ? kept.residents[min(asked.slot, p.slots - 1)] : resident_of(asked.slot);
        const uint32_t expert = sorted() ? expert_of_sorted(asked.row) : asked.said;
        const bool found = asked.token < p.token_count & asked.slot < p.slots & resident < p.residents & expert < p.num_experts;
        return found ? resident * p.num_experts + expert : ~0u;
    }
};
