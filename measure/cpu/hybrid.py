"""Measure steps of a model with recurrent state on a CPU, with torch and with the native kernels.

`python -m measure.cpu.hybrid --rows 1 16` writes the config.json of a Qwen3.5 decoder with 190 million parameters (6
layers with the gated delta rule, 2 with attention), and loads it twice with random bf16 weights: with
`QUIRE_CPU_KERNELS=off`, and with the best level. It computes a prompt and decode steps with both in turn. It prints
this process's CPU time, which depends less on other load than elapsed time: the median of the rounds, and their range.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3_5TextConfig

from kernels.native.serving import native
from shared.config import WorkerConfig
from worker_svc.device.choice import set_threads
from worker_svc.memory.kv_pool import allocate
from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.loader import load_model
from worker_svc.model.recurrent import StateCounts

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")
_SIZES = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a layer of Qwen3.5-0.8B."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each row before the first decode step")
    parser.add_argument("--steps", type=int, default=10, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=0)
    options = parser.parse_args()
    set_threads(options.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3_5TextConfig(**_SIZES, architectures=["Qwen3_5ForCausalLM"])  # type: ignore[arg-type]
        config.save_pretrained(folder)
        models = {kernels: _load(Path(folder), kernels) for kernels in ("off", "auto")}
    for rows in options.rows:
        times: dict[str, list[tuple[float, float]]] = {kernels: [] for kernels in models}
        for _ in range(options.rounds):
            for kernels, model in models.items():
                times[kernels].append(_round(model, rows, options.prompt, options.steps))
        for kernels, rounds in times.items():
            prompts, steps = zip(*rounds, strict=True)
            text = f"prompt {_text(prompts)}, decode step {_text(steps)}"
            print(f"{rows:2} rows, kernels {kernels:4}: {text}", flush=True)
        print(f"load average: {os.getloadavg()[0]:.1f}")


def _load(folder: Path, kernels: str) -> Model:
    os.environ["QUIRE_CPU_KERNELS"] = kernels
    native.cache_clear()
    config = WorkerConfig(model=str(folder), device="cpu", dtype="bfloat16", load_format="random")
    return load_model(config, _CPU)[0]


def _text(times: tuple[float, ...]) -> str:
    return f"{statistics.median(times):.1f} ms ({min(times):.1f}-{max(times):.1f})"


def _round(model: Model, rows: int, prompt: int, steps: int) -> tuple[float, float]:
    """Return the CPU time of a prompt's step and of a decode step, in ms."""
    blocks = -(-(prompt + steps) // _BLOCK_SIZE)
    caches = allocate(model.kv_shapes, rows * blocks, _BLOCK_SIZE, torch.bfloat16, _CPU, "context")
    model.allocate_states(StateCounts(rows))
    tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    times = []
    for first, count in ((0, prompt), *((prompt + step, 1) for step in range(steps))):
        new = torch.arange(first, first + count)
        attention = AttentionInputs(
            slot_mapping=(tables[:, new // _BLOCK_SIZE].long() * _BLOCK_SIZE + new % _BLOCK_SIZE).flatten(),
            block_tables=tables,
            query_start=torch.arange(rows + 1, dtype=torch.int32) * count,
            context_lens=torch.full((rows,), first + count, dtype=torch.int32),
            max_query_len=count,
            rows=np.arange(rows),
        )
        last = torch.arange(1, rows + 1) * count - 1
        began = time.process_time()
        model.forward(torch.arange(rows * count) % 1000, new.repeat(rows), attention, caches, last)
        times.append((time.process_time() - began) * 1e3)
    return times[0], statistics.mean(times[1:])


if __name__ == "__main__":
    main()
