#include "expand.cuh"
#include "expand_spread.cuh"

// Blocks of `lora_expand_mixed_64` that a multiprocessor has shared memory for, and is to have registers for; blocks of `lora_expand_spread_small_32` that it has
// registers for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMixed64Blocks = 2;
constexpr int kSpreadSmall32Blocks = 5;
#else
constexpr int kMixed64Blocks = 4;
constexpr int kSpreadSmall32Blocks = 6;
#endif

extern "C" __global__ void __launch_bounds__(kExpandThreads, 5)
lora_expand_small_16(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_small<16>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 5)
lora_expand_small_32(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_small<32>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 4)
lora_expand_small_64(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_small<64>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 6)
lora_expand_spread_small_16(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_small<16, true>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, kSpreadSmall32Blocks)
lora_expand_spread_small_32(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_small<32, true>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 5)
lora_expand_mixed_16(const __grid_constant__ DeltaParams p, const SiteEnds ends) {
    expand_mixed<16>(p, ends);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, kMixed64Blocks)
lora_expand_mixed_64(const __grid_constant__ DeltaParams p, const SiteEnds ends) {
    expand_mixed<64>(p, ends);
}

// Four blocks a multiprocessor, by the registers that they are left: were there room for five, some would have five and others three of a single wave.
extern "C" __global__ void __launch_bounds__(kExpandThreads, 4)
lora_expand_spread_16(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_spread<Weights16<>>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 4)
lora_expand_spread_32(const __grid_constant__ DeltaParams p, const SiteEnds ends, uint32_t runs) {
    expand_spread<Weights<1>>(p, ends, runs);
}

extern "C" __global__ void __launch_bounds__(kExpandThreads, 2)
lora_expand_any(const __grid_constant__ DeltaParams p, const SiteEnds ends) {
    expand_mixed<512>(p, ends);
}
