"""Memory profile: runs the largest possible step once at the start, to measure the memory of a step without KV.

In this step, all requests have rules and typical-p, and all prompts request log-probabilities. Other kinds of steps
follow, so that no kernel is compiled while requests wait. On a CPU, none of these steps is needed.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kernels.sampling import SamplingTensors, nonfinite_rows, sample
from kernels.token_masks import mask_tokens
from shared.frames import MAX_LOGPROBS
from worker_svc.interface.arrays import NO_IDS
from worker_svc.interface.limits import Limits
from worker_svc.interface.plan import NO_LOGPROBS, Rules, SamplingParams
from worker_svc.memory.kv_pool import allocate
from worker_svc.model.base import AttentionInputs, KVCache, Model
from worker_svc.outputs.logits import LogitsBatch, LogitsRules
from worker_svc.outputs.scores import score

_RULES = SamplingParams(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    typical_p=1.0,
    seed=0,
    choice=0,
    logprobs=NO_LOGPROBS,
    prompt_logprobs=NO_LOGPROBS,
    stop_token_ids=NO_IDS,
    rules=Rules(
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        bias_token_ids=np.zeros(1, np.int32),
        bias_values=np.ones(1, np.float32),
        allowed_token_ids=NO_IDS,
        banned_token_ids=NO_IDS,
        bad_words=(),
        min_tokens=0,
    ),
)
"""A request with a bias and all penalties."""


@torch.inference_mode()
def run_largest_step(model: Model, limits: Limits, dtype: torch.dtype, device: torch.device) -> int:
    """Run a step with the maximum number of tokens in sequences of maximum length, and sample every row.

    Logits are computed for all tokens, as for prompt log-probabilities. A chunk with two tokens runs first; see
    `_run_short_chunk`.

    Returns:
        The bytes of KV that were allocated for the step.
    """
    num_tokens = limits.max_tokens_per_step
    caches, attention, positions = _longest_sequences(model, limits, dtype, device)
    _run_short_chunk(model, caches, limits, device)
    logits = model.forward(
        torch.zeros_like(positions), positions, attention, caches, torch.arange(num_tokens, device=device)
    )
    _sample_in_every_way(logits[: min(limits.max_rows, num_tokens)])
    score(logits, torch.zeros_like(positions), MAX_LOGPROBS).packed()
    return _num_bytes(caches)


@torch.inference_mode()
def run_captured_step(model: Model, limits: Limits, num_logits: int, dtype: torch.dtype, device: torch.device) -> int:
    """Run the captured part of the largest step: the forward pass, with `num_logits` logits.

    Returns:
        The bytes of KV that were allocated for the step.
    """
    caches, attention, positions = _longest_sequences(model, limits, dtype, device)
    sampling = torch.arange(num_logits, device=device)
    model.forward(torch.zeros_like(positions), positions, attention, caches, sampling)
    return _num_bytes(caches)


def _longest_sequences(
    model: Model, limits: Limits, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[KVCache, ...], AttentionInputs, torch.Tensor]:
    """Return the KV cache and the inputs for a step with the maximum number of tokens in sequences of maximum length.

    Returns:
        The cache, the inputs of attention, and the positions `[max_tokens_per_step] int64`.
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
    return caches, attention, on_device(positions, torch.int64)


def _run_short_chunk(model: Model, caches: Sequence[KVCache], limits: Limits, device: torch.device) -> None:
    """Run a chunk of two tokens with the widest block table.

    For a short chunk with a long context, attention splits the keys among programs, and another kernel combines the
    parts.
    """
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    attention = AttentionInputs(
        slot_mapping=torch.arange(2, device=device),
        block_tables=torch.zeros(1, limits.max_blocks_per_row, dtype=torch.int32, device=device),
        query_start=torch.tensor([0, 2], dtype=torch.int32, device=device),
        context_lens=torch.tensor([2], dtype=torch.int32, device=device),
        max_query_len=2,
    )
    model.forward(zeros, zeros, attention, caches, zeros[:1])


def _sample_in_every_way(logits: torch.Tensor) -> None:
    """Sample logits `[num_rows, vocab_size]` with every kind of parameter, so that all kernels are compiled.

    All rows have rules, and request log-probabilities of the model's own logits.
    """
    device, (num_rows, vocab_size) = logits.device, logits.shape
    rules, batch = _rules_of_all(num_rows, vocab_size, device)
    ones = torch.ones(num_rows, dtype=torch.int32, device=device)
    shares = torch.full((num_rows,), 0.5, device=device)
    params = SamplingTensors(
        temperature=shares,
        top_k=ones,
        top_p=shares,
        min_p=shares,
        seed=ones.long(),
        choice=ones,
        position=ones,
        any_random=True,
        any_truncation=True,
    )
    all_allowed = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    first_row = batch.index[:1]
    raw = logits[batch.index]
    changed = rules.apply(logits, batch, np.zeros(num_rows, np.int64))
    for scores in (logits, changed):  # Rules convert the logits to float32.
        nonfinite_rows(scores)
        mask_tokens(scores, first_row, all_allowed, first_row)
        sample(scores, params)
        sample(scores, replace(params, any_truncation=False))
        sample(scores, replace(params, any_random=False, any_truncation=False))
    tokens = sample(changed, replace(params, typical_p=shares))
    score(raw, tokens, MAX_LOGPROBS)


def _rules_of_all(num_rows: int, vocab_size: int, device: torch.device) -> tuple[LogitsRules, LogitsBatch]:
    rules = LogitsRules(vocab_size, device)
    for row in range(num_rows):
        rules.admit(row, _RULES, np.zeros(1, np.int32), 1)
    batch = rules.batch(np.arange(num_rows))
    assert batch is not None
    return rules, batch


def _num_bytes(caches: Sequence[KVCache]) -> int:
    return sum(tensor.nbytes for pair in caches for tensor in pair)
