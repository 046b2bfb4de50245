"""From a loaded model to an engine: the limits of this worker and a KV pool of the right size."""

import dataclasses

import torch
from opentelemetry.trace import Tracer

from shared.config import WorkerConfig, parse_bytes
from worker_svc.accelerator import Accelerator
from worker_svc.decode_graphs import buckets
from worker_svc.engine import Engine
from worker_svc.grammars import GrammarStore
from worker_svc.kv_pool import allocate, block_bytes, count_blocks, cuda_memory_left
from worker_svc.limits import Limits
from worker_svc.model.base import Model
from worker_svc.model.loader import ModelDescription
from worker_svc.profiling import run_largest_step

_LOGIT_BYTES = 4
"""Of each lane of each decode graph, at most: every graph keeps its logits."""
_TOKENS_PER_STEP = {"cpu": 128, "cuda": 512}
"""Enough for matrix products at full speed. On a CPU, where each token costs a millisecond or more, every one beyond
that only lengthens what those who decode wait for a neighbour's prompt."""


def tokens_per_step(device: torch.device, max_rows: int) -> int:
    """Most tokens of a step where nobody said; at least half of them are left to prompts."""
    return max(_TOKENS_PER_STEP[device.type], 2 * max_rows)


def build_engine(
    config: WorkerConfig,
    model: Model,
    description: ModelDescription,
    device: torch.device,
    tracer: Tracer,
    accelerator: Accelerator | None,
) -> Engine:
    """The engine that serves `model` within the memory that `config` allows; `accelerator` orders the work on
    `device` (`make_accelerator`).

    Raises:
        ConfigError: a size that is none, or no memory for a single block.
    """
    limits = Limits(
        max_rows=config.max_num_seqs,
        max_tokens_per_step=config.max_num_batched_tokens or tokens_per_step(device, config.max_num_seqs),
        max_model_len=description.max_model_len,
        block_size=config.block_size,
        num_blocks=0,
        vocab_size=description.vocab_size,
        hidden_size=model.hidden_size,
    )
    setting = "kv_cache_memory" if device.type == "cpu" else "gpu_memory_utilization"
    num_blocks = count_blocks(
        _memory_for_kv(config, model, limits, description.kv_dtype, device),
        block_bytes(model.kv_shapes, limits.block_size, description.kv_dtype),
        limits.max_rows * limits.max_blocks_per_row,
        setting,
    )
    bytes_per_block = block_bytes(model.kv_shapes, limits.block_size, description.kv_dtype)
    num_host_blocks = parse_bytes(config.swap_space) // bytes_per_block
    limits = dataclasses.replace(limits, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
    caches = allocate(model.kv_shapes, num_blocks, limits.block_size, description.kv_dtype, device, setting)
    return Engine(
        model,
        caches,
        limits,
        device,
        tracer,
        grammars=_grammar_store(description),
        accelerator=accelerator,
        decode_graphs=config.decode_graphs and model.capturable,
    )


def _grammar_store(description: ModelDescription) -> GrammarStore | None:
    path = description.folder / "tokenizer.json"
    return GrammarStore(path, description.vocab_size, description.eos_token_ids) if path.is_file() else None


def _memory_for_kv(config: WorkerConfig, model: Model, limits: Limits, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return parse_bytes(config.kv_cache_memory)
    lanes = sum(buckets(limits.max_rows)) if config.decode_graphs and model.capturable else 0
    return cuda_memory_left(
        device,
        config.gpu_memory_utilization,
        lambda: run_largest_step(model, limits, dtype, device),
        lanes * limits.vocab_size * _LOGIT_BYTES,
    )
