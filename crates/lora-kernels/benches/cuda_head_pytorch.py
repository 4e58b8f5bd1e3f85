"""The product of a whole head in PyTorch (cuBLAS): what `cuda_overlay` is compared with.

python3 crates/lora-kernels/benches/cuda_head_pytorch.py
"""

import torch

VOCAB, HIDDEN, RUNS = 152064, 4096, 20


def median_us(rows):
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
    torch.matmul(x, weight.T, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.matmul(x, weight.T, out=out)
    times = []
    for _ in range(RUNS + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return sorted(times[3:])[RUNS // 2]


weight = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
for rows in (1, 8, 64, 256, 512):
    us = median_us(rows)
    flops = 2 * rows * VOCAB * HIDDEN
    print(f"{rows} rows: {us:.1f} us, {flops / us / 1e6:.1f} TFLOP/s, {VOCAB * HIDDEN * 2 / us / 1e3:.0f} GB/s")
