#include "delta_cluster.cuh"
#include "delta_rows.cuh"
#include "delta_spread.cuh"

extern "C" __global__ void __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_spread_1024(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_spread<1>(p, ends, outputs);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_spread_2048(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_spread<2>(p, ends, outputs);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_rows_16(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_rows<1, 1, Weights16<>>(p, ends, outputs);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_rows_32(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_rows<2, 1, Weights<1>>(p, ends, outputs);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_rows_32_2048(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_rows<2, 2, Weights<1>>(p, ends, outputs);
}

extern "C" __global__ void __cluster_dims__(kTileBlocks, 1, 1) __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_halves_16(const __grid_constant__ DeltaParams p, const SiteEnds, uint32_t outputs) {
    delta_halves<1, Weights16<>>(p, outputs);
}

extern "C" __global__ void __cluster_dims__(kTileBlocks, 1, 1) __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_halves_32(const __grid_constant__ DeltaParams p, const SiteEnds, uint32_t outputs) {
    delta_halves<2, Weights<1>>(p, outputs);
}

extern "C" __global__ void __cluster_dims__(kTileBlocks, 1, 1) __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_cross_16(const __grid_constant__ DeltaParams p, const SiteEnds, uint32_t outputs) {
    delta_cross<kTileBlocks, 1>(p, outputs);
}

extern "C" __global__ void __cluster_dims__(kTileBlocks, 1, 1) __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_cross_16_pair(const __grid_constant__ DeltaParams p, const SiteEnds, uint32_t outputs) {
    delta_cross<kTileBlocks, 2>(p, outputs);
}

extern "C" __global__ void __cluster_dims__(kWideTileBlocks, 1, 1) __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_cross_16_4096(const __grid_constant__ DeltaParams p, const SiteEnds, uint32_t outputs) {
    delta_cross<kWideTileBlocks, 1>(p, outputs);
}

extern "C" __global__ void __cluster_dims__(kWideTileBlocks, 1, 1) __launch_bounds__(kShrinkThreads, kDeltaBlocks)
lora_delta_cross_16_4096_pair(const __grid_constant__ DeltaParams p, const SiteEnds, uint32_t outputs) {
    delta_cross<kWideTileBlocks, 2>(p, outputs);
}
