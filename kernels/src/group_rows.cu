#include "group_rows.cuh"

extern "C" __global__ void __launch_bounds__(kMaxGroupThreads)
lora_group_rows(const __grid_constant__ GroupParams p, uint32_t capacity) {
    group_rows(p, capacity);
}
