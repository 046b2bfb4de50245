"""From a loaded model to an engine: the limits of this worker and a KV pool of the right size."""

import dataclasses

import numpy as np
import torch
from opentelemetry.trace import Tracer

from kernels.sampling import SamplingTensors, sample
from shared.config import ConfigError, WorkerConfig, parse_bytes
from worker_svc.engine import Engine
from worker_svc.kv_pool import allocate, block_bytes, count_blocks, cuda_memory_left
from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.loader import ModelDescription
from worker_svc.rows import Limits


def build_engine(
    config: WorkerConfig, model: Model, description: ModelDescription, device: torch.device, tracer: Tracer
) -> Engine:
    """The engine that serves `model` within the memory that `config` allows.

    Raises:
        ConfigError: a setting out of range, or no memory for a single block.
    """
    for setting in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        if getattr(config, setting) < 1:
            raise ConfigError(f"{setting}: {getattr(config, setting)} is less than 1")
    limits = Limits(
        max_rows=config.max_num_seqs,
        max_tokens_per_step=config.max_num_batched_tokens,
        max_model_len=description.max_model_len,
        block_size=config.block_size,
        num_blocks=0,
        vocab_size=description.vocab_size,
    )
    setting = "kv_cache_memory" if device.type == "cpu" else "gpu_memory_utilization"
    num_blocks = count_blocks(
        _memory_for_kv(config, model, limits, description.dtype, device),
        block_bytes(model.kv_shapes, limits.block_size, description.dtype),
        limits.max_rows * limits.max_blocks_per_row,
        setting,
    )
    limits = dataclasses.replace(limits, num_blocks=num_blocks)
    caches = allocate(model.kv_shapes, num_blocks, limits.block_size, description.dtype, device, setting)
    return Engine(model, caches, limits, device, tracer)


def _memory_for_kv(config: WorkerConfig, model: Model, limits: Limits, dtype: torch.dtype, device: torch.device) -> int:
    if device.type == "cpu":
        return parse_bytes(config.kv_cache_memory)
    return cuda_memory_left(device, config.gpu_memory_utilization, lambda: _profile(model, limits, dtype, device))


@torch.inference_mode()
def _profile(model: Model, limits: Limits, dtype: torch.dtype, device: torch.device) -> int:
    """Runs the largest step there can be, one token short of nothing: all tokens in chunks as long as sequences may
    be, logits for all rows, and sampling with every filter on. Returns the bytes of KV that it took."""
    num_tokens, block_size = limits.max_tokens_per_step, limits.block_size
    starts = np.minimum(np.arange(0, num_tokens + limits.max_model_len, limits.max_model_len), num_tokens)
    lengths = np.diff(starts)
    lengths = lengths[lengths > 0]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    blocks_per_row = -(-lengths // block_size)
    num_blocks = int(blocks_per_row.sum())
    caches = allocate(model.kv_shapes, num_blocks, block_size, dtype, device, "gpu_memory_utilization")
    first_blocks = np.cumsum(blocks_per_row) - blocks_per_row
    positions = np.concatenate([np.arange(length) for length in lengths])
    slots = np.repeat(first_blocks * block_size, lengths) + positions
    tables = first_blocks[:, None] + np.minimum(np.arange(blocks_per_row.max()), blocks_per_row[:, None] - 1)

    def on_device(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device, dtype)

    attention = AttentionInputs(
        slot_mapping=on_device(slots, torch.int64),
        block_tables=on_device(tables, torch.int32),
        query_start=on_device(starts, torch.int32),
        context_lens=on_device(lengths, torch.int32),
        max_query_len=int(lengths.max()),
    )
    num_samples = min(limits.max_rows, num_tokens)
    logits = model.forward(
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        on_device(positions, torch.int64),
        attention,
        caches,
        torch.arange(num_samples, device=device),
    )
    ones = torch.ones(num_samples, dtype=torch.int32, device=device)
    shares = torch.full((num_samples,), 0.5, device=device)
    sample(
        logits,
        SamplingTensors(
            temperature=shares,
            top_k=ones,
            top_p=shares,
            min_p=shares,
            seed=ones.long(),
            choice=ones,
            position=ones,
            any_random=True,
            any_truncation=True,
        ),
    )
    return num_blocks * block_bytes(model.kv_shapes, block_size, dtype)
