"""Speed of decode attention on a CPU by type of KV cache, at every instruction level of this processor.

`python -m measure.cpu.kv [--rows 16] [--context 2048] [--heads 16] [--kv-heads 4] [--head-dim 64]` measures the
attention of one token per row in several layers, with one thread. All types compute in turn, so that other programs on
the machine slow all of them alike. Every layer has its own cache, so that keys and values come from memory. The output
is the median CPU time of each type, with the rows' blocks in random and in ascending order, and the median ratio
between int8 and each type in the same turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from kernels.kv_quantised import DTYPES, GROUP, to_quantised
from kernels.native.attention import paged_attention_native
from kernels.native.library import Native, native_levels
from kernels.native.selftest import failure
from worker_svc.device.choice import set_threads

_BLOCK_SIZE = 16
_BASE = "int8"


@torch.inference_mode()
def main() -> None:
    """Measure and print a line for each level, order of blocks and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=2048, help="keys per row")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    if options.head_dim % GROUP:
        raise SystemExit(
            f"kv: --head-dim {options.head_dim} is not a multiple of {GROUP}, which int4 needs; use another one"
        )
    set_threads(1)
    per_row = -(-options.context // _BLOCK_SIZE)
    blocks = options.rows * per_row
    caches = {"bf16": _caches(options, blocks, None)} | {name: _caches(options, blocks, name) for name in DTYPES}
    query = torch.randn(options.rows, options.heads, options.head_dim)
    starts = torch.arange(options.rows + 1, dtype=torch.int32)
    contexts = torch.full((options.rows,), options.context, dtype=torch.int32)
    print(
        f"{options.rows} rows of {options.context} keys, {options.heads} heads and {options.kv_heads} KV heads of"
        f" {options.head_dim}, {options.layers} layers, load {os.getloadavg()[0]:.1f}; ms of CPU time"
    )
    for level in (each for each in native_levels() if each.level_name != "portable" and failure(each) is None):
        for order, places in (("random", torch.randperm(blocks)), ("ascending", torch.arange(blocks))):
            batch = (places.int().view(options.rows, per_row), starts, contexts)
            times: dict[str, list[float]] = {name: [] for name in caches}
            for turn in range(options.turns + 1):
                for name, layers in caches.items():
                    milliseconds = _milliseconds(level, query, layers, batch)
                    if turn > 0:
                        times[name].append(milliseconds)
            for name, taken in times.items():
                ratios = [base / own for base, own in zip(times[_BASE], taken, strict=True)]
                print(
                    f"{level.level_name:<8} {order:<10} {name:<6} {statistics.median(taken):8.2f}"
                    f"   {_BASE} / {name}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    flush=True,
                )


def _caches(options: argparse.Namespace, blocks: int, kind: str | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of each layer."""
    one = torch.randn(blocks, options.kv_heads, _BLOCK_SIZE, options.head_dim)
    cache = one.bfloat16() if kind is None else to_quantised(one, DTYPES[kind])
    return [(cache.clone(), cache.clone()) for _ in range(options.layers)]


def _milliseconds(
    kernels: Native,
    query: torch.Tensor,
    layers: list[tuple[torch.Tensor, torch.Tensor]],
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> float:
    began = time.process_time()
    for keys, values in layers:
        paged_attention_native(query, keys, values, *batch, scale=0.125, kernels=kernels)
    return (time.process_time() - began) * 1e3


if __name__ == "__main__":
    main()
