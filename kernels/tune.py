"""Tuning of the attention kernels' tiles on the present GPU.

    python -m kernels.tune                tune the missing entries for this GPU's architecture (minutes)
    python -m kernels.tune --again        tune all entries
    python -m kernels.tune --budget-s 500 --table FILE
                                          start no entry after 500 s; write the table to another file

For each kernel, head dimension and type of KV, every candidate is timed on a few batches, and the one with the shortest
total time wins. A candidate that does not compile, or needs too much shared memory, is skipped. The table is written
after every entry, so that the run can be stopped and restarted at any time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from kernels._triton import architecture
from kernels.bench import median_seconds
from kernels.fp8 import quantize
from kernels.paged_attention import paged_attention
from kernels.paged_attention.tuning import TABLE, Key, Tuning, default_tuning, read_table, tried, write_table

_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16
_DECODE = ((1, 8192), (64, 1024), (16, 8192))
_PREFILL = (512, 4096)


def candidates(key: Key) -> Iterator[Tuning]:
    """Yield the candidates, the default first.

    A candidate takes seconds to compile, so hopeless ones are left out: warps without a part of the tile, and pipelines
    of fewer than two tiles.
    """
    yield default_tuning(key)
    if key.kernel == "decode":
        tries = [Tuning(16, *rest) for rest in product((32, 64, 128), (4, 8), (3, 4))]
    else:
        tries = [
            Tuning(rows, keys, warps, stages)
            for (rows, warps), keys, stages in product(((64, 4), (128, 8)), (32, 64, 128), (2, 3, 4))
        ]
    for tuning in tries:
        if tuning != default_tuning(key):
            yield tuning


def keys(sm: int) -> list[Key]:
    """Return the entries of one architecture, most common models first."""
    return [
        Key(kernel, sm, dim_tile, kv_bytes)
        for dim_tile, kv_bytes, kernel in product((128, 64, 256), (2, 1), ("decode", "prefill"))
    ]


def batches(key: Key, device: torch.device) -> list[Callable[[], torch.Tensor]]:
    """Return the calls to time for an entry."""
    kv_dtype = torch.uint8 if key.kv_bytes == 1 else torch.bfloat16
    shapes = _DECODE if key.kernel == "decode" else tuple((1, tokens) for tokens in _PREFILL)
    calls: list[Callable[[], torch.Tensor]] = []
    for rows, context in shapes:
        pages = rows * context // _BLOCK_SIZE
        drawn = torch.randn(2, pages, _KV_HEADS, _BLOCK_SIZE, key.dim_tile, device=device, dtype=torch.bfloat16)
        caches = quantize(drawn) if kv_dtype == torch.uint8 else drawn
        tables = torch.randperm(pages, device=device).view(rows, -1).int()
        length = 1 if key.kernel == "decode" else context
        query = torch.randn(rows * length, _HEADS, key.dim_tile, device=device, dtype=torch.bfloat16)
        starts = torch.arange(rows + 1, device=device).int() * length
        contexts = torch.full((rows,), context, device=device).int()
        given = (query, caches[0], caches[1], tables, starts, contexts)
        calls.append(
            partial(paged_attention, *given, min_query_len=length, max_query_len=length, scale=key.dim_tile**-0.5)
        )
    return calls


def seconds(calls: list[Callable[[], torch.Tensor]], device: torch.device) -> float:
    """Return the total time of the calls."""
    return sum(median_seconds(call, device, budget_s=0.05) for call in calls)


def main(arguments: list[str] | None = None) -> int:
    """Tune the missing entries; return 1 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description="Tune the attention kernels.")
    parser.add_argument("--again", action="store_true", help="tune entries again that the table already has")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no new entry after this many seconds"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="file to write the table to")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("python -m kernels.tune: no GPU found; run it on a machine with a CUDA GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    table, deadline = dict(read_table()), time.monotonic() + options.budget_s
    with torch.inference_mode():
        for key in keys(architecture(torch.empty(0, device=device))):
            if (key in table and not options.again) or time.monotonic() > deadline:
                continue
            calls, times = batches(key, device), dict[Tuning, float]()
            for tuning in candidates(key):
                tried[key] = tuning
                try:
                    times[tuning] = seconds(calls, device)
                except Exception as error:  # skip a candidate that does not compile or launch
                    print(f"  {tuning}: {type(error).__name__}")
            tried.clear()
            if not times:
                print(f"{key}: no configuration could be launched", flush=True)
                continue
            table[key] = min(times, key=lambda tuning: times[tuning])
            write_table(table, options.table)
            gain = times[default_tuning(key)] / times[table[key]] if default_tuning(key) in times else 0.0
            print(f"{key}: {table[key]}, {gain:.2f} x the default", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
