"""Time sampling on a CPU with the kernels and with torch: `python -m measure.cpu.sampling [--threads 2]`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kernels.sampling import SamplingTensors, _sample_by_torch, sample_checked
from worker_svc.device.choice import set_threads

_SWEPT_BYTES = 48 << 20
_CASES = (
    ("temperature 1", 1.0, 0, 1.0, 0.0),
    ("the same, peaked", 4.0, 0, 1.0, 0.0),
    ("top_k 50", 1.0, 50, 1.0, 0.0),
    ("top_p 0.9", 1.0, 0, 0.9, 0.0),
    ("min_p 0.05", 1.0, 0, 1.0, 0.05),
    ("top_k 50, top_p 0.9, peaked", 4.0, 50, 0.9, 0.0),
)
"""Name, standard deviation of the logits, top_k, top_p, min_p."""


def parameters(num_rows: int, top_k: int, top_p: float, min_p: float) -> SamplingTensors:
    """Return the parameters of every row: temperature 1 and these filters."""
    rows = torch.arange(num_rows)
    return SamplingTensors(
        temperature=torch.ones(num_rows),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seed=rows << 40,
        choice=torch.zeros_like(rows).int(),
        position=rows.int(),
        any_random=True,
        any_truncation=top_k > 0 or top_p < 1 or min_p > 0,
    )


def median_ms(compute: Callable[[], torch.Tensor], repeats: int) -> float:
    """Return the milliseconds for one call with the cache state that a step leaves."""
    swept = torch.zeros(_SWEPT_BYTES // 4)
    times = []
    for _ in range(repeats):
        swept.add_(1)
        began = time.perf_counter()
        compute()
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


@torch.inference_mode()
def main() -> None:
    """Print a line for each vocabulary, number of rows and case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0, help="number of threads; 0: all cores")
    set_threads(parser.parse_args().threads)
    for vocab_size in (32_000, 128_256):
        for num_rows in (1, 16):
            for name, deviation, top_k, top_p, min_p in _CASES:
                logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * deviation
                params = parameters(num_rows, top_k, top_p, min_p)
                by_torch = median_ms(lambda x=logits, p=params: _sample_by_torch(x, p), 7)  # type: ignore[misc]
                now = median_ms(lambda x=logits, p=params: sample_checked(x, p), 15)  # type: ignore[misc]
                print(f"{vocab_size:7} x {num_rows:2}  {name:28} torch {by_torch:7.1f} ms   kernels {now:6.2f} ms")


if __name__ == "__main__":
    main()
