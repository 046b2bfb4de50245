"""Construction of the engine for a loaded model: the worker's limits and the size of its KV cache."""

import dataclasses

import torch
from opentelemetry.trace import Tracer

from shared.config import WorkerConfig, parse_bytes
from shared.grammars import GrammarError, GrammarTokenizer
from shared.logging import get_logger
from worker_svc.device.accelerator import Accelerator
from worker_svc.execution.decode_graphs import buckets
from worker_svc.execution.engine import Engine
from worker_svc.interface.limits import Limits
from worker_svc.memory.kv_pool import allocate, block_bytes, count_blocks, cuda_memory_left
from worker_svc.memory.profiling import run_largest_step
from worker_svc.model.base import Model
from worker_svc.model.loader import ModelDescription
from worker_svc.outputs.grammars import GrammarStore

_LOGIT_BYTES = 4
"""Upper bound of the bytes of one logit; every decode graph keeps the logits of all its lanes."""
_TOKENS_PER_STEP = {"cpu": 128, "cuda": 512}
"""Default token budget of a step by type of device: enough for matrix products at full speed. On a CPU a token takes a
millisecond or more, and each token of a prompt delays the rows in decode."""


def tokens_per_step(device: torch.device, max_rows: int) -> int:
    """Return the default limit of tokens per step; at least half of them are available to prefill."""
    return max(_TOKENS_PER_STEP[device.type], 2 * max_rows)


def build_engine(
    config: WorkerConfig,
    model: Model,
    description: ModelDescription,
    device: torch.device,
    tracer: Tracer,
    accelerator: Accelerator | None,
) -> Engine:
    """Build the engine that serves `model` within the memory that `config` allows.

    Args:
        config: the worker's configuration.
        model: the loaded model.
        description: the sizes and types of `model`.
        device: the device of `model`.
        tracer: creates the spans of steps and rows.
        accelerator: the result of `make_accelerator` for `device`.

    Raises:
        ConfigError: a size is invalid, or the memory does not hold a single block.
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
        grammars=make_grammar_store(description, limits.max_rows),
        accelerator=accelerator,
        decode_graphs=config.decode_graphs and model.capturable,
    )


def make_grammar_store(description: ModelDescription, max_rows: int) -> GrammarStore | None:
    """Return the grammar store of a model; None if its tokenizer does not support grammars.

    Reads the tokenizer now, before the first step.
    """
    path = description.folder / "tokenizer.json"
    try:
        tokenizer = GrammarTokenizer(path, description.vocab_size, description.eos_token_ids)
    except GrammarError as error:
        get_logger().info("grammars not supported by this worker", reason=str(error))
        return None
    return GrammarStore(tokenizer, description.eos_token_ids, max_rows)


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
