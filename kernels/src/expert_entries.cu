#include "expert_entries.cuh"

extern "C" __global__ void __launch_bounds__(kEntryThreads)
lora_expert_entries(const __grid_constant__ EntryParams p) {
    expert_entries(p);
}
