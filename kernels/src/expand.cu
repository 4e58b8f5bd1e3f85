#include "expand.cuh"

extern "C" __global__ void __launch_bounds__(kExpandThreads) lora_expand_16(const __grid_constant__ DeltaParams p, uint32_t steps) {
    expand<1, false>(p, steps);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 2) lora_expand_64(const __grid_constant__ DeltaParams p, uint32_t steps) {
    expand<2, false>(p, steps);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 2) lora_expand_512(const __grid_constant__ DeltaParams p, uint32_t steps) {
    expand<2, true>(p, steps);
}
