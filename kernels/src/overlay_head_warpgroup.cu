#include "overlay_head_kept.cuh"

extern "C" __global__ void __cluster_dims__(kLogitParts, 1, 1) __launch_bounds__(kHeadKeptThreads, 1)
lora_head_kept(const __grid_constant__ LogitsParams p) {
    kept_logits(p);
}
