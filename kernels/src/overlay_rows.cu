#include "overlay_rows.cuh"

extern "C" __global__ void __launch_bounds__(kRowThreads)
lora_row_diff(const __grid_constant__ RowDiffParams p) {
    row_diff(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
lora_gather_rows(const __grid_constant__ GatherRowsParams p) {
    gather_rows(p);
}

extern "C" __global__ void __launch_bounds__(kRowThreads)
lora_replace_rows(const __grid_constant__ ReplaceRowsParams p) {
    replace_rows(p);
}
