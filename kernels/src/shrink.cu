#include "shrink.cuh"
#include "shrink_streamed.cuh"
#include "shrink_tiled.cuh"

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 4)
lora_shrink_small(const __grid_constant__ DeltaParams p, const SiteEnds block_ends, uint32_t) {
    shrink_small<false>(p, block_ends, 1);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 4)
lora_shrink_small_ranks(const __grid_constant__ DeltaParams p, const SiteEnds block_ends, uint32_t groups) {
    shrink_small<true>(p, block_ends, groups);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 3)
lora_shrink_streamed_16(const __grid_constant__ DeltaParams p, uint32_t shares, uint32_t) {
    shrink_streamed<1>(p, shares);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 2)
lora_shrink_streamed_32(const __grid_constant__ DeltaParams p, uint32_t shares, uint32_t) {
    shrink_streamed<2>(p, shares);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 1)
lora_shrink_mixed(const __grid_constant__ DeltaParams p, uint32_t parts, uint32_t set_groups) {
    shrink_mixed<true, kChunkK>(p, parts, set_groups);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 1)
lora_shrink_mixed_low(const __grid_constant__ DeltaParams p, uint32_t parts, uint32_t set_groups) {
    shrink_mixed<true, kChunkK / 2>(p, parts, set_groups);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 2)
lora_shrink_unaligned(const __grid_constant__ DeltaParams p, uint32_t parts, uint32_t set_groups) {
    shrink_mixed<false, kChunkK>(p, parts, set_groups);
}

extern "C" __global__ void __launch_bounds__(kSumThreads)
lora_sum_blocks(const __grid_constant__ DeltaParams p) {
    sum_blocks(p);
}
