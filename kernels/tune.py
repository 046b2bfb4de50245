"""Finds the attention kernels' tiles on the GPU at hand and writes them into their table.

    python -m kernels.tune                all entries of this GPU's architecture that the table lacks (minutes)
    python -m kernels.tune --again        those it has, too

For each kernel, head dimension and type of KV every candidate is timed on a few batches; the one with the least total
time wins. One that does not compile, or wants more shared memory than there is, is passed over. The table is written
after every entry, so that the run may be ended and begun again at any time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product

import torch

from kernels._triton import architecture
from kernels.bench import median_seconds
from kernels.paged_attention import paged_attention
from kernels.paged_attention.tuning import Key, Tuning, default_tuning, read_table, tried, write_table

_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16
_DECODE = ((1, 8192), (64, 1024), (16, 8192))
_PREFILL = (512, 4096)


def candidates(key: Key) -> Iterator[Tuning]:
    """What is tried: the default first."""
    yield default_tuning(key)
    rows = (16,) if key.kernel == "decode" else (64, 128)
    for block_m, block_n, num_warps, num_stages in product(rows, (16, 32, 64, 128), (2, 4, 8), (2, 3, 4)):
        tuning = Tuning(block_m, block_n, num_warps, num_stages)
        if tuning != default_tuning(key):
            yield tuning


def keys(sm: int) -> list[Key]:
    """The entries of one architecture."""
    return [
        Key(kernel, sm, dim_tile, kv_bytes)
        for kernel, dim_tile, kv_bytes in product(("decode", "prefill"), (64, 128, 256), (1, 2))
    ]


def seconds(key: Key, device: torch.device) -> float:
    """Total time of the batches that an entry is judged by."""
    kv_dtype = torch.uint8 if key.kv_bytes == 1 else torch.bfloat16
    shapes = _DECODE if key.kernel == "decode" else tuple((1, tokens) for tokens in _PREFILL)
    total = 0.0
    for rows, context in shapes:
        pages = rows * context // _BLOCK_SIZE
        cache = torch.zeros(pages, _KV_HEADS, _BLOCK_SIZE, key.dim_tile, dtype=kv_dtype, device=device)
        tables = torch.randperm(pages, device=device).view(rows, -1).int()
        length = 1 if key.kernel == "decode" else context
        query = torch.randn(rows * length, _HEADS, key.dim_tile, device=device, dtype=torch.bfloat16)
        starts = torch.arange(rows + 1, device=device).int() * length
        contexts = torch.full((rows,), context, device=device).int()

        def run(
            query: torch.Tensor = query,
            cache: torch.Tensor = cache,
            tables: torch.Tensor = tables,
            starts: torch.Tensor = starts,
            contexts: torch.Tensor = contexts,
            length: int = length,
        ) -> None:
            paged_attention(query, cache, cache, tables, starts, contexts, max_query_len=length, scale=0.1)

        total += median_seconds(run, device, budget_s=0.05)
    return total


def main(arguments: list[str] | None = None) -> int:
    """Tunes what is missing; 1 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.tune", description="Tune the attention kernels.")
    parser.add_argument("--again", action="store_true", help="entries that the table has, too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("tuning needs a GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    table = dict(read_table())
    with torch.inference_mode():
        for key in keys(architecture(torch.empty(0, device=device))):
            if key in table and not options.again:
                continue
            times: dict[Tuning, float] = {}
            for tuning in candidates(key):
                tried[key] = tuning
                try:
                    times[tuning] = seconds(key, device)
                except Exception as error:  # a candidate that cannot be compiled or launched is no candidate
                    print(f"  {tuning}: {type(error).__name__}")
            tried.clear()
            table[key] = min(times, key=lambda tuning: times[tuning])
            write_table(table)
            gain = times[default_tuning(key)] / times[table[key]] if default_tuning(key) in times else 0.0
            print(f"{key}: {table[key]}, {gain:.2f} x the default", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
