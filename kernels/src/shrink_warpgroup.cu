#include "shrink_warpgroup.cuh"

extern "C" __global__ void __launch_bounds__(kWarpgroupShrinkThreads, 1)
lora_shrink_warpgroup_64(const __grid_constant__ DeltaParams p, uint32_t sets, uint32_t) {
    shrink_warpgroup<1>(p, sets);
}

extern "C" __global__ void __launch_bounds__(kWarpgroupShrinkThreads, 1)
lora_shrink_warpgroup_128(const __grid_constant__ DeltaParams p, uint32_t sets, uint32_t) {
    shrink_warpgroup<2>(p, sets);
}

extern "C" __global__ void __launch_bounds__(kWarpgroupShrinkThreads, 1)
lora_shrink_warpgroup_192(const __grid_constant__ DeltaParams p, uint32_t sets, uint32_t) {
    shrink_warpgroup<3>(p, sets);
}
