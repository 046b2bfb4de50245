"""Studies that only compute: length buckets, the KV of a card, kinds of parallelism, and flags of other servers."""

import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from measure.claims.virtual import Values
from measure.strategies import cases
from measure.strategies.bounds import continuous_steps, fewest_steps, static_steps
from measure.testbed.service import QUIRE, ROOT
from quire_server.cli import serve
from quire_server.cli._other_servers import REMEDIES
from quire_server.cli._parser import OneLineParser

CARD = "layers=80,kv_heads=8,head_dim=128,positions=8192,parameters=20e9"
"""A model with 40 GB of weights in 16 bits, and the KV shape of a 70B model."""
_GPUS = 4
_BYTES_PER_S, _WEIGHTS_BYTES, _LAYERS = 3.35e12, 141e9, 80
"""Memory bandwidth of an H100, and a 70B model in 16 bits."""
_ALL_REDUCE_S, _SEND_S, _STEP_S = 15e-6, 10e-6, 1e-3
"""Assumed times of an all-reduce of one row among four GPUs, of a transfer to the next stage, and of a step's rest."""

FLAGS = {
    "vLLM": (
        "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len", "--gpu-memory-utilization", "--block-size",
        "--swap-space", "--scheduler-delay-factor", "--long-prefill-token-threshold", "--kv-cache-dtype",
        "--quantization", "--tensor-parallel-size", "--enable-chunked-prefill", "--enable-prefix-caching",
        "--preemption-mode", "--scheduling-policy", "--speculative-config", "--pipeline-parallel-size",
    ),
    "TensorRT-LLM": (
        "--max-batch-size", "--max-num-tokens", "--max-seq-len", "--max-tokens-in-paged-kv-cache",
        "--kv-cache-free-gpu-mem-fraction", "--batching-type", "--batch-scheduler-policy", "--enable-chunked-context",
        "--enable-kv-cache-reuse", "--paged-kv-cache", "--max-beam-width", "--pp-size",
    ),
}  # fmt: skip
"""Flags of batching and scheduling that the articles name, by server."""
_OTHER_MEANING = {("TensorRT-LLM", "--max-batch-size"): "use --max-num-seqs; --max-batch-size is for static batches"}
"""Flags that `quire serve` has with another meaning."""


def buckets() -> Values:
    """Return the steps of static batches in order of arrival and in order of length, and those of other schedulers."""
    found: Values = {}
    for workload in (cases.UNIFORM, cases.EXPONENTIAL):
        lengths, slots = workload.lengths, workload.slots
        noise = np.random.default_rng(0).uniform(0.5, 1.5, len(lengths))
        guessed = [length for _, length in sorted(zip((np.array(lengths) * noise).tolist(), lengths, strict=True))]
        found[workload.name] = {
            "slots": slots,
            "order of arrival": static_steps(lengths, slots),
            "sorted by length": static_steps(sorted(lengths), slots),
            "sorted by a guess within 50 %": static_steps(guessed, slots),
            "continuous": continuous_steps(lengths, slots),
            "fewest": fewest_steps(lengths, slots),
        }
    return found


def _capacity(*flags: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "capacity.json"
        command = [*QUIRE, "capacity", *flags, "--json", str(file)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(file.read_text("utf-8")))


def kv_budget() -> Values:
    """Return how many requests an 80 GB card with 40 GB of weights holds, by type of the KV cache."""
    found: Values = {}
    for dtype in ("auto", "fp8", "int4"):
        result = _capacity("--params", CARD, "--gpu-memory", "80GB", "--kv-cache-dtype", dtype)
        found[dtype] = {"bytes_per_token": result["kv_bytes_per_token"], "requests": result["max_concurrent"]}
    wrong = _capacity("--params", CARD.replace("kv_heads=8", "kv_heads=64"), "--gpu-memory", "80GB")
    found["counted with 64 query heads"] = {
        "bytes_per_token": wrong["kv_bytes_per_token"],
        "requests": wrong["max_concurrent"],
    }
    return found


def parallel() -> Values:
    """Return the computed time of a decode step of a 70B model on four H100, divided by tensors and by layers.

    The step reads all weights once. With micro-batches, stages of the pipeline work at the same time.
    """
    read = _WEIGHTS_BYTES / _BYTES_PER_S
    tensor = read / _GPUS + 2 * _LAYERS * _ALL_REDUCE_S + _STEP_S
    pipeline = read + (_GPUS - 1) * _SEND_S + _STEP_S
    stage = read / _GPUS + _SEND_S + _STEP_S / _GPUS
    return {
        "gpus": _GPUS,
        "one_request_ms": {"tensor": round(1e3 * tensor, 1), "pipeline": round(1e3 * pipeline, 1)},
        "steps_per_s_with_4_micro_batches": {"tensor": round(1 / tensor, 1), "pipeline": round(1 / stage, 1)},
        "pipeline_busy_share_by_micro_batches": {
            str(count): round(count / (count + _GPUS - 1), 3) for count in (1, 4, 16)
        },
    }


def flags() -> Values:
    """Return for each flag that the articles name whether `quire serve` has it, or what it says instead."""
    parser = OneLineParser("quire serve", description="", examples="")
    serve.configure(parser)
    own = {flag for action in parser.actions() for flag in action.option_strings}
    return {
        server: {
            flag: _OTHER_MEANING.get((server, flag)) or ("same name" if flag in own else REMEDIES[flag])
            for flag in names
        }
        for server, names in FLAGS.items()
    }
