"""Memory profile: runs the largest possible step once at start, to measure the memory of a step besides KV."""

from itertools import product

import numpy as np
import torch

from kernels.sampling import SamplingTensors, sample
from worker_svc.interface.limits import Limits
from worker_svc.memory.kv_pool import allocate, block_bytes
from worker_svc.model.base import AttentionInputs, Model


@torch.inference_mode()
def run_largest_step(model: Model, limits: Limits, dtype: torch.dtype, device: torch.device) -> int:
    """Run a step with the maximum number of tokens, in sequences of the maximum length, and sample every row.

    Returns:
        The bytes of KV that were allocated for the step.
    """
    num_tokens, block_size = limits.max_tokens_per_step, limits.block_size
    starts = np.append(np.arange(0, num_tokens, limits.max_model_len), num_tokens)
    lengths = np.diff(starts)
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
    # Every way of sampling, so that its kernels are compiled before the first request: rows with rules have float32.
    for scores, (random, truncated) in product(
        (logits, logits[:1].float()), ((True, True), (True, False), (False, False))
    ):
        rows = len(scores)
        sample(
            scores,
            SamplingTensors(
                temperature=shares[:rows],
                top_k=ones[:rows],
                top_p=shares[:rows],
                min_p=shares[:rows],
                seed=ones[:rows].long(),
                choice=ones[:rows],
                position=ones[:rows],
                any_random=random,
                any_truncation=truncated,
            ),
        )
    return num_blocks * block_bytes(model.kv_shapes, block_size, dtype)
