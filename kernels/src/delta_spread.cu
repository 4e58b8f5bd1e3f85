#include "delta_spread.cuh"

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 2)
lora_delta_spread_1024(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_spread<1>(p, ends, outputs);
}

extern "C" __global__ void __launch_bounds__(kShrinkThreads, 2)
lora_delta_spread_2048(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t outputs) {
    delta_spread<2>(p, ends, outputs);
}
