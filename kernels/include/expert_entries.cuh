// Which table entry each row of a MoE block takes: (adapter of its token, its expert). One thread a row.
#pragma once

#include "params.cuh"
#include "primitives.cuh"

// The expert whose rows hold `row`: one less than how many bounds are at or before it. Bounds do not decrease; an expert without rows shares
// both of its bounds. Before the first bound the result is -1, from the last on it is `num_experts`.
__device__ __forceinline__ int32_t expert_of_sorted_row(const uint32_t* offsets, uint32_t num_experts, uint32_t row) {
    uint32_t low = 0;
    uint32_t high = num_experts + 1;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (__ldcg(offsets + middle) <= row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return static_cast<int32_t>(low) - 1;
}

__device__ __forceinline__ void expert_entries(const EntryParams& p) {
    wait_for_predecessor();
    const uint32_t row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= p.rows) return;
    const bool sorted = p.experts == 0;
    const uint32_t token = sorted ? __ldcg(reinterpret_cast<const uint32_t*>(p.tokens) + row) : row / p.top_k;
    const uint32_t expert =
        sorted ? expert_of_sorted_row(reinterpret_cast<const uint32_t*>(p.offsets), p.num_experts, row)
               : static_cast<uint32_t>(__ldcg(reinterpret_cast<const int32_t*>(p.experts) + row));
    int32_t entry = -1;
    // Negative numbers are past every limit once they are unsigned.
    if (token < p.token_count && expert < p.num_experts) {
        const uint32_t slot = __ldcg(reinterpret_cast<const int32_t*>(p.adapters) + token);
        if (slot < p.slots) {
            const uint32_t resident = __ldcg(reinterpret_cast<const int32_t*>(p.resident_of_slot) + slot);
            if (resident < p.residents) entry = static_cast<int32_t>(resident * p.num_experts + expert);
        }
    }
    reinterpret_cast<int32_t*>(p.entries)[row] = entry;
}
