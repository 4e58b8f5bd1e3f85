// Prefix sums over a block.
#pragma once

#include <cstdint>

constexpr uint32_t kAllLanes = ~0u;

__device__ __forceinline__ uint32_t lane_up(uint32_t value, uint32_t distance) {
    return __shfl_up_sync(kAllLanes, value, distance);
}

// Inclusive prefix sums over a warp.
template <typename T>
__device__ __forceinline__ T warp_inclusive_scan(T sum) {
#pragma unroll
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
        const T before = lane_up(sum, distance);
        if (threadIdx.x % 32 >= distance) sum = sum + before;
    }
    return sum;
}

__device__ __forceinline__ uint32_t lane_sum(uint32_t value) { return __reduce_add_sync(kAllLanes, value); }

// Exclusive prefix sums over the block of one value a thread; `total` is the sum. `warp_sums`: a value of shared memory for each warp.
template <typename T>
__device__ __forceinline__ T block_exclusive_scan(T value, T* warp_sums, T& total) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const T inclusive = warp_inclusive_scan(value);
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    const T of_lane = lane < blockDim.x / 32 ? warp_sums[lane] : T{};
    total = lane_sum(of_lane);
    const T before = lane_sum(lane < warp ? of_lane : T{});
    __syncthreads();
    return before + inclusive - value;
}
