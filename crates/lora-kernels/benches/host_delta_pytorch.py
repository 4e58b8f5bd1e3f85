"""PyTorch's side of the host_delta bench: the two products and the fold in BF16 on two threads, 4096 -> 4096.

Run it right before or after `cargo bench -p lora-kernels --bench host_delta`, on the same machine. Without AMX or BF16 dot products:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2.
"""

import time

import torch

WIDTH = 4096
SECONDS = 1.5


def measure(rows: int, rank: int) -> tuple[float, float]:
    """Median and least microseconds of one delta."""
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16)
    a = torch.randn(rank, WIDTH, dtype=torch.bfloat16) / WIDTH**0.5
    b = torch.randn(WIDTH, rank, dtype=torch.bfloat16) / rank**0.5
    out = torch.randn(rows, WIDTH, dtype=torch.bfloat16)

    def delta() -> None:
        out.add_((x @ a.T) @ b.T, alpha=0.5)

    times = []
    end = time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end:
        delta()
        times.append(time.perf_counter() - start)
    times = sorted(times[len(times) // 5 :])
    return times[len(times) // 2] * 1e6, times[0] * 1e6


def main() -> None:
    torch.set_num_threads(2)
    print(torch.__version__, torch.backends.cpu.get_cpu_capability(), "2 threads")
    with torch.inference_mode():
        for rank in (16, 64):
            for rows in (1, 8, 64):
                median, least = measure(rows, rank)
                print(f"rank {rank:2} rows {rows:2}: median {median:8.1f} us, least {least:8.1f} us")


if __name__ == "__main__":
    main()
