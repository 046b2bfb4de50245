"""Steps with prompt chunks as captured CUDA graphs.

The host needs milliseconds to launch the kernels of such a step one by one. With few tokens or a small model, the
device computes the step in less time. Steps with up to `step_sizes.largest_captured` tokens are therefore captured
completely. There is one graph per *size*, the number of tokens to which a batch is padded. Attention is captured too,
because its launches depend only on values that are fixed per graph: numbers of tokens, rows and rows with chunks, and
the width of the block tables.

Unlike in `decode_graphs`, the host sends the inputs for each step. They are copied into tensors at fixed addresses.
Padding rows have no tokens and come first, so that the rows with chunks come last. Padding tokens come last and belong
to no row. Larger steps are not captured, nor are steps with many chunks, drafts, embeddings or prompt
log-probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shared.logging import get_logger
from worker_svc.device.accelerator import Accelerator, Graph
from worker_svc.execution.batch import StepBatch
from worker_svc.interface.limits import Limits
from worker_svc.model.base import AttentionInputs, KVCache, Model

_SMALLEST = 32
"""Tokens of the smallest graph."""
_DOUBLED_UNTIL = 128
"""Sizes double up to this one."""
_TOKENS_PER_CHUNK = 32
"""A graph has room for one chunk per this number of tokens, and for at least `_LEAST_CHUNKS` chunks."""
_LEAST_CHUNKS = 8


def mixed_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of tokens to capture graphs for, ascending: 32, 64, 128, 192, ..., 512, 640, ..., `most`.

    Padding of a step below 256 tokens is cheap, because the step reads all weights anyway. A larger step
    has at most 127 padding tokens.
    """
    sizes: list[int] = []
    size = _SMALLEST
    while size < most:
        sizes.append(size)
        size += size if size < _DOUBLED_UNTIL else 64 if size < 512 else 128
    return (*sizes, most) if most > 0 else ()


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of one graph."""

    num_tokens: int
    num_rows: int
    num_chunks: int
    """Rows at the end that may have more than one token."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and its result."""

    shape: _Shape
    graph: Graph
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Input tensors for all graphs; each graph reads the first part of each tensor."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logits_index: torch.Tensor
    query_start: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor


class MixedGraphs:
    """Captured graphs of steps with chunks, one per size."""

    def __init__(
        self,
        accelerator: Accelerator,
        limits: Limits,
        model: Model,
        caches: Sequence[KVCache],
        sizes: Sequence[int],
    ) -> None:
        self._accelerator = accelerator
        self._model = model
        self._caches = caches
        self._shapes = tuple(_shape(size, limits.max_rows) for size in sizes)
        self._graphs: list[_Captured] = []
        most, rows = self._shapes[-1].num_tokens, self._shapes[-1].num_rows
        wide = torch.zeros(3, most, dtype=torch.int64, device=accelerator.device)
        narrow = torch.zeros(2, rows + 1, dtype=torch.int32, device=accelerator.device)
        self._inputs = _Inputs(
            input_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2].fill_(-1),
            logits_index=torch.zeros(rows, dtype=torch.int64, device=accelerator.device),
            query_start=narrow[0],
            context_lens=narrow[1],
            block_tables=torch.zeros(rows, limits.max_blocks_per_row, dtype=torch.int32, device=accelerator.device),
        )

    def capture(self) -> None:
        """Capture all graphs with an empty batch, the largest first, because the others then fit into its memory."""
        for shape in reversed(self._shapes):
            self._graphs.insert(0, _Captured(shape, *self._accelerator.capture(partial(self._compute, shape))))
        get_logger().info("graphs of steps with chunks captured", sizes=[shape.num_tokens for shape in self._shapes])

    def forward(self, batch: StepBatch) -> torch.Tensor | None:
        """Enqueue a step if a graph fits it.

        Returns:
            Logits `[S, vocab_size]` for the sampling rows, valid until the next call; None if no graph fits the step.
        """
        captured = next((each for each in self._graphs if each.shape.num_tokens >= batch.num_tokens), None)
        if captured is None or batch.logits_index is None or batch.prompt_parts or batch.pooled_parts:
            return None
        if len(batch.rows) - batch.attention.num_leading_decodes > captured.shape.num_chunks:
            return None
        if len(batch.sample_rows) > captured.shape.num_rows:
            return None
        self._send(captured.shape, batch, batch.logits_index)
        captured.graph.replay()
        return captured.logits[: len(batch.sample_rows)]

    def _send(self, shape: _Shape, batch: StepBatch, logits_index: torch.Tensor) -> None:
        """Copy a step's inputs into the graphs' tensors.

        Padding tokens keep the ids and positions of an earlier step, because they belong to no row and are not written
        to the KV cache. Entries for padding rows are set to zero, because an earlier step may have used these rows.
        """
        inputs, given = self._inputs, batch.attention
        num_tokens, num_rows, num_samples = batch.num_tokens, len(batch.rows), len(batch.sample_rows)
        first_row, end = shape.num_rows - num_rows, shape.num_rows
        inputs.input_ids[:num_tokens].copy_(batch.input_ids)
        inputs.positions[:num_tokens].copy_(batch.positions)
        inputs.slot_mapping[:num_tokens].copy_(given.slot_mapping)
        inputs.slot_mapping[num_tokens : shape.num_tokens].fill_(-1)
        inputs.query_start[:first_row].zero_()
        inputs.query_start[first_row : end + 1].copy_(given.query_start)
        inputs.context_lens[:first_row].zero_()
        inputs.context_lens[first_row:end].copy_(given.context_lens)
        inputs.block_tables[first_row:end, : given.block_tables.shape[1]].copy_(given.block_tables)
        inputs.logits_index[:num_samples].copy_(logits_index)
        inputs.logits_index[num_samples:end].zero_()

    def _compute(self, shape: _Shape) -> torch.Tensor:
        inputs, num_tokens, num_rows = self._inputs, shape.num_tokens, shape.num_rows
        attention = AttentionInputs(
            slot_mapping=inputs.slot_mapping[:num_tokens],
            block_tables=inputs.block_tables[:num_rows],
            query_start=inputs.query_start[: num_rows + 1],
            context_lens=inputs.context_lens[:num_rows],
            max_query_len=num_tokens,
            num_leading_decodes=num_rows - shape.num_chunks,
        )
        return self._model.forward(
            inputs.input_ids[:num_tokens],
            inputs.positions[:num_tokens],
            attention,
            self._caches,
            inputs.logits_index[:num_rows],
        )


def _shape(num_tokens: int, max_rows: int) -> _Shape:
    num_rows = min(max_rows, num_tokens)
    return _Shape(num_tokens, num_rows, min(num_rows, max(_LEAST_CHUNKS, num_tokens // _TOKENS_PER_CHUNK)))
