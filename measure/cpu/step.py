"""Measure the phases of one step on a CPU.

`python -m measure.cpu.step --model FOLDER --rows 16 --context 200 [--quantization int4] [--kv-cache-dtype int8]` loads
the model as a worker does. It computes decode steps in this process, with the given numbers of rows and keys per row.
With `--chunk 128`, the last 128 keys of each row are new tokens. It prints the median times of a step and of each
phase, and the fraction of the step that the phases account for.
"""

import argparse
import time

import torch

from kernels.decoder import PackedDecoder
from shared.config import WorkerConfig
from worker_svc.device.choice import set_threads
from worker_svc.memory.kv_pool import allocate
from worker_svc.model.base import AttentionInputs
from worker_svc.model.llama import LlamaModel
from worker_svc.model.loader import load_model

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--chunk", type=int, default=1, help="tokens of each row in a step; 1: decode")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--num-threads", type=int, default=0)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()
    set_threads(options.num_threads)
    config = WorkerConfig(
        model=options.model, device="cpu", quantization=options.quantization, kv_cache_dtype=options.kv_cache_dtype
    )
    model, description = load_model(config, _CPU)
    if not isinstance(model, LlamaModel) or (decoder := model.packed) is None:
        raise SystemExit("the CPU kernels do not support this model on this machine")
    rows, context, chunk = options.rows, max(options.context, options.chunk), options.chunk
    times = _run(model, decoder, description.kv_dtype, rows, context, chunk, options.steps)
    step_ms, phases = sorted(times)[len(times) // 2] * 1e3, decoder.counted_ns()
    counted_ms = {name: value / len(times) / 1e6 for name, value in phases.items()}
    mean_ms = sum(times) / len(times) * 1e3
    size = f"{rows} rows of {context} keys" + (f", {chunk} tokens each" if chunk > 1 else "")
    rate = rows * chunk / step_ms * 1e3
    print(f"{size}: {step_ms:.2f} ms a step (median), {mean_ms:.2f} ms (mean), {rate:.0f} tokens/s")
    print("  ".join(f"{name} {value:.2f}" for name, value in counted_ms.items()))
    print(f"accounted for: {sum(counted_ms.values()) / mean_ms:.1%} of the mean")


def _run(
    model: LlamaModel, decoder: PackedDecoder, kv_dtype: torch.dtype, rows: int, context: int, chunk: int, steps: int
) -> list[float]:
    blocks = -(-context // _BLOCK_SIZE)
    caches = allocate(model.kv_shapes, rows * blocks, _BLOCK_SIZE, kv_dtype, _CPU, "context")
    tables = torch.randperm(rows * blocks, dtype=torch.int32).view(rows, blocks)
    new = torch.arange(context - chunk, context)
    attention = AttentionInputs(
        slot_mapping=(tables[:, new // _BLOCK_SIZE].long() * _BLOCK_SIZE + new % _BLOCK_SIZE).flatten(),
        block_tables=tables,
        query_start=torch.arange(rows + 1, dtype=torch.int32) * chunk,
        context_lens=torch.full((rows,), context, dtype=torch.int32),
        max_query_len=chunk,
    )
    ids, positions = torch.arange(rows * chunk), new.repeat(rows)
    times = []
    for step in range(steps + 3):
        if step == 3:  # warm
            decoder.count_time()
        began = time.perf_counter()
        model.forward(ids, positions, attention, caches, None)
        times.append(time.perf_counter() - began)
    return times[3:]


if __name__ == "__main__":
    main()
