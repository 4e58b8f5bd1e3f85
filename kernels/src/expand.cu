#include "expand.cuh"

extern "C" __global__ void __launch_bounds__(kExpandThreads, 5) lora_expand_small(const __grid_constant__ DeltaParams p, uint32_t runs) {
    expand_small(p, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 3) lora_expand_mixed_32(const __grid_constant__ DeltaParams p, uint32_t runs) {
    expand_mixed<1, false>(p, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 3) lora_expand_mixed_64(const __grid_constant__ DeltaParams p, uint32_t runs) {
    expand_mixed<2, false>(p, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 2) lora_expand_long(const __grid_constant__ DeltaParams p, uint32_t runs) {
    expand_mixed<2, true>(p, runs);
}
