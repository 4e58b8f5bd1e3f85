#include "expert_entries.cuh"
#include "group_rows.cuh"

extern "C" __global__ void __launch_bounds__(kMaxGroupThreads, 1)
lora_group_rows(const __grid_constant__ GroupParams p, uint32_t capacity) {
    group_rows(p, SlotSource{reinterpret_cast<const int32_t*>(p.seq_slot)}, capacity);
}

extern "C" __global__ void __launch_bounds__(kMaxGroupThreads, 1)
lora_group_experts(const __grid_constant__ GroupParams p, const __grid_constant__ EntryParams entries, uint32_t capacity) {
    __shared__ ExpertSource::Kept kept;
    group_rows(p, ExpertSource(entries, kept), capacity);
}

extern "C" __global__ void __cluster_dims__(kGroupBlocks, 1, 1) __launch_bounds__(kGroupThreads, 2)
lora_group_many_rows(const __grid_constant__ GroupParams p, uint32_t capacity) {
    group_many_rows(p, SlotSource{reinterpret_cast<const int32_t*>(p.seq_slot)}, capacity);
}

extern "C" __global__ void __cluster_dims__(kGroupBlocks, 1, 1) __launch_bounds__(kGroupThreads, 2)
lora_group_many_experts(const __grid_constant__ GroupParams p, const __grid_constant__ EntryParams entries, uint32_t capacity) {
    __shared__ ExpertSource::Kept kept;
    group_many_rows(p, ExpertSource(entries, kept), capacity);
}
