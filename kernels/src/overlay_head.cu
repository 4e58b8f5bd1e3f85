#include "overlay_head.cuh"

extern "C" __global__ void __cluster_dims__(HeadFewDeep::kBlocks, 1, 1) __launch_bounds__(kHeadThreads, 1)
lora_head_few_deep(const __grid_constant__ LogitsParams p) {
    head_logits<HeadFewDeep>(p);
}

extern "C" __global__ void __cluster_dims__(HeadFew::kBlocks, 1, 1) __launch_bounds__(kHeadThreads, 2)
lora_head_few(const __grid_constant__ LogitsParams p) {
    head_logits<HeadFew>(p);
}

extern "C" __global__ void __cluster_dims__(HeadPair::kBlocks, 1, 1) __launch_bounds__(kHeadThreads, 1)
lora_head_pair(const __grid_constant__ LogitsParams p) {
    head_logits<HeadPair>(p);
}

extern "C" __global__ void __cluster_dims__(HeadSplit::kBlocks, 1, 1) __launch_bounds__(kHeadThreads, 2)
lora_head_split(const __grid_constant__ LogitsParams p) {
    head_logits<HeadSplit>(p);
}

extern "C" __global__ void __cluster_dims__(HeadSplitLow::kBlocks, 1, 1) __launch_bounds__(kHeadThreads, 1)
lora_head_split_low(const __grid_constant__ LogitsParams p) {
    head_logits<HeadSplitLow>(p);
}

extern "C" __global__ void __cluster_dims__(HeadUnaligned::kBlocks, 1, 1) __launch_bounds__(kHeadThreads, 2)
lora_head_unaligned(const __grid_constant__ LogitsParams p) {
    head_logits<HeadUnaligned>(p);
}

extern "C" __global__ void __launch_bounds__(kHeadThreads, 1)
lora_head_wide(const __grid_constant__ LogitsParams p) {
    head_logits<HeadWide>(p);
}
