"""Tuning of the attention kernels' tiles on the present GPU.

    python -m measure.kernels.tune                tune the missing entries for this GPU's architecture (minutes)
    python -m measure.kernels.tune --again        tune all entries
    python -m measure.kernels.tune --budget-s 500 --table FILE
                                          start no entry after 500 s; write the table to another file

For each kernel, head dimension and KV type, every candidate is timed on a few batches. The candidate with the smallest
sum of times relative to the default wins, so short batches count as much as long ones. Candidates that do not compile,
or need too much shared memory, are skipped. The table is written after every entry, so that the run can be stopped and
restarted at any time. An entry takes about a minute, mostly for compilation; bf16 with head dimension 128 comes first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import fsum
from operator import truediv
from pathlib import Path

import torch

from kernels._dispatch import architecture
from kernels.kv_quantised import to_quantised
from kernels.paged_attention import paged_attention, schedule_decode
from kernels.paged_attention.tuning import TABLE, Key, Tuning, default_tuning, read_table, tried, write_table
from measure.kernels.bench import median_seconds

_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16
_DECODE = ((1, 1024), (8, 1024), (64, 1024), (32, 8192))
"""(rows, context) of the batches for decode."""
_PREFILL = ((512, 512), (2048, 2048), (8192, 8192), (65536, 128))
"""(context, chunk tokens) of the prefill batches."""


def candidates(key: Key) -> Iterator[Tuning]:
    """Yield the candidates, the default first.

    A candidate takes seconds to compile, so hopeless ones are omitted: warps without a part of the tile, and pipelines
    with fewer than two tiles.
    """
    yield default_tuning(key)
    if key.kernel == "decode":
        tries = [Tuning(16, *rest) for rest in product((32, 64), (2, 4), (3, 4, 5))]
        tries += [Tuning(16, 128, warps, 3) for warps in (4, 8)]
    else:
        tries = [
            Tuning(rows, keys, warps, stages)
            for (rows, warps), keys, stages in product(((64, 4), (128, 8)), (32, 64, 128), (3, 4))
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
    """Return the calls to time for an entry; a CPU, which computes the reference, gets one small batch."""
    calls: list[Callable[[], torch.Tensor]] = []
    shapes: tuple[tuple[int, ...], ...]
    shapes = _DECODE if key.kernel == "decode" else tuple((1, *shape) for shape in _PREFILL)
    if device.type == "cpu":
        shapes = ((1, 64),) if key.kernel == "decode" else ((1, 64, 64),)
    for rows, context, *chunk in shapes:
        pages = rows * context // _BLOCK_SIZE
        drawn = torch.randn(2, pages, _KV_HEADS, _BLOCK_SIZE, key.dim_tile, device=device, dtype=torch.bfloat16)
        caches = [to_quantised(each, torch.uint8) for each in drawn] if key.kv_bytes == 1 else drawn
        tables = torch.randperm(pages, device=device).view(rows, -1).int()
        length = chunk[0] if chunk else 1
        query = torch.randn(rows * length, _HEADS, key.dim_tile, device=device, dtype=torch.bfloat16)
        starts = torch.arange(rows + 1, device=device).int() * length
        contexts = torch.full((rows,), context, device=device).int()
        schedule = None if chunk else schedule_decode(starts, contexts, num_kv_heads=_KV_HEADS)
        given = (query, caches[0], caches[1], tables, starts, contexts)
        known = partial(paged_attention, *given, min_query_len=length, max_query_len=length, schedule=schedule)
        calls.append(partial(known, scale=key.dim_tile**-0.5))
    return calls


def tune_entry(key: Key, device: torch.device) -> tuple[Tuning, float]:
    """Return the fastest candidate for an entry, and its time relative to the default.

    Raises:
        RuntimeError: no candidate could be launched.
    """
    calls, times = batches(key, device), dict[Tuning, list[float]]()
    try:
        for tuning in candidates(key):
            tried[key] = tuning
            try:
                times[tuning] = seconds(calls, device)
            except Exception as error:  # Skip a candidate that does not compile or launch.
                print(f"  {tuning}: {type(error).__name__}")
    finally:
        tried.clear()
    if not times:
        raise RuntimeError(f"{key}: no configuration could be launched")
    base = next(iter(times.values()))  # The time of the default parameters, if they could be launched.
    found = min(times, key=lambda tuning: relative(times[tuning], base))
    return found, relative(times[found], base)


def seconds(calls: list[Callable[[], torch.Tensor]], device: torch.device) -> list[float]:
    return [median_seconds(call, device, budget_s=0.05) for call in calls]


def relative(times: list[float], base: list[float]) -> float:
    """Return the mean of some times, each relative to its base."""
    return fsum(map(truediv, times, base)) / len(base)


def main(arguments: list[str] | None = None) -> int:
    """Tune the missing entries; return 1 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m measure.kernels.tune", description="Tune the attention kernels.")
    parser.add_argument("--again", action="store_true", help="tune existing entries again")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="start no new entry after this many seconds"
    )
    parser.add_argument("--table", type=Path, default=TABLE, help="file to write the table to")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("python -m measure.kernels.tune: no GPU found; run it on a machine with a CUDA GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    table, deadline = dict(read_table()), time.monotonic() + options.budget_s
    with torch.inference_mode():
        for key in keys(architecture(torch.empty(0, device=device))):
            if (key in table and not options.again) or time.monotonic() > deadline:
                continue
            try:
                table[key], share = tune_entry(key, device)
            except RuntimeError as error:
                print(error, flush=True)
                continue
            write_table(table, options.table)
            print(f"{key}: {table[key]}, {share:.3f} of the default's time", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
