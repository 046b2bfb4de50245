"""Steps with prompt chunks or drafts as captured CUDA graphs.

The host needs milliseconds to launch the kernels of such a step one by one. With few tokens or a small model, the
device computes the step in less time. Steps with up to `step_sizes.largest_captured` tokens are therefore captured
completely. There is one graph per *shape*: the numbers of tokens, rows, rows with several tokens, and logits to which a
step is padded. Attention is captured too, because its launches depend only on these numbers and on the width of the
block tables.

Unlike in `decode_graphs`, the host sends the inputs for each step. They are copied into tensors at fixed addresses.
Padding rows have no tokens and come first, so that the rows with several tokens come last. Padding tokens come last and
belong to no row. Larger steps are not captured, nor are steps with many chunks, embeddings or prompt log-probabilities.

A row with drafts is a row with several tokens, all of which need logits. In the shapes for drafts, every row may
be one. A draft model computes its passes by graphs of the same shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shared.logging import get_logger
from worker_svc.device.accelerator import Capture, Graph
from worker_svc.interface.limits import Limits
from worker_svc.model.base import AttentionInputs, KVCache, Model

_SMALLEST = 32
"""Tokens of the smallest graph for chunks."""
_SMALLEST_DRAFTS = 8
"""Tokens of the smallest graph for drafts."""
_DOUBLED_UNTIL = 128
"""Sizes double up to this one."""
_TOKENS_PER_CHUNK = 32
"""A graph has room for one chunk per this number of tokens, and for at least `_LEAST_CHUNKS` chunks."""
_LEAST_CHUNKS = 8
_ONE_ROW_UNTIL = 32
"""Up to this number of tokens, a graph for drafts in one row exists: attention divides the keys of a single row among
more programs."""


def mixed_sizes(most: int, smallest: int = _SMALLEST) -> tuple[int, ...]:
    """Return the numbers of tokens to capture graphs for, ascending: 32, 64, 128, 192, ..., 512, 640, ..., `most`.

    Padding of a step below 256 tokens is cheap, because the step reads all weights anyway. A larger step
    has at most 127 padding tokens.
    """
    sizes: list[int] = []
    size = smallest
    while size < most:
        sizes.append(size)
        size += size if size < _DOUBLED_UNTIL else 64 if size < 512 else 128
    return (*sizes, most) if most > 0 else ()


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Sizes of one graph. Shapes are ordered by cost."""

    num_tokens: int
    num_several: int
    """Rows at the end that may have more than one token."""
    num_logits: int
    num_rows: int


def chunk_shapes(most: int, max_rows: int) -> tuple[Shape, ...]:
    """Return the shapes for steps with chunks of up to `most` tokens; each row samples at most once."""
    found = []
    for size in mixed_sizes(most):
        num_rows = min(max_rows, size)
        several = min(num_rows, max(_LEAST_CHUNKS, size // _TOKENS_PER_CHUNK))
        found.append(Shape(num_tokens=size, num_several=several, num_logits=num_rows, num_rows=num_rows))
    return tuple(found)


def draft_shapes(most: int, limits: Limits) -> tuple[Shape, ...]:
    """Return the shapes for steps of up to `most` tokens in which all rows may have drafts; none without speculation.

    Such a step may have chunks, too.
    """
    if not limits.max_draft_tokens:
        return ()
    most_logits = limits.max_rows * (1 + limits.max_draft_tokens)
    found = []
    for size in mixed_sizes(most, _SMALLEST_DRAFTS):
        num_rows, num_logits = min(limits.max_rows, size), min(most_logits, size)
        if size <= _ONE_ROW_UNTIL:
            found.append(Shape(num_tokens=size, num_several=1, num_logits=num_logits, num_rows=num_rows))
        several = min(num_rows, max(1, size // 2))
        found.append(Shape(num_tokens=size, num_several=several, num_logits=num_logits, num_rows=num_rows))
    return tuple(sorted(set(found)))


def pass_shapes(for_drafts: Sequence[Shape]) -> tuple[Shape, ...]:
    """Return the shapes for passes of a draft model, which need one logit per row."""
    return tuple(replace(shape, num_logits=shape.num_rows) for shape in for_drafts)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and its result."""

    shape: Shape
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


class StepGraphs:
    """Captured graphs of one model's steps, one per shape."""

    def __init__(
        self,
        capture: Capture,
        device: torch.device,
        limits: Limits,
        model: Model,
        caches: Sequence[KVCache],
        shapes: Sequence[Shape],
    ) -> None:
        """Allocate the inputs; `shapes` must not be empty."""
        self._capture = capture
        self._model = model
        self._caches = caches
        self._shapes = tuple(sorted(set(shapes)))
        self._graphs: list[_Captured] = []
        most, rows = (max(getattr(shape, name) for shape in shapes) for name in ("num_tokens", "num_rows"))
        wide = torch.zeros(4, most, dtype=torch.int64, device=device)
        narrow = torch.zeros(2, rows + 1, dtype=torch.int32, device=device)
        self._inputs = _Inputs(
            input_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2].fill_(-1),
            logits_index=wide[3],
            query_start=narrow[0],
            context_lens=narrow[1],
            block_tables=torch.zeros(rows, limits.max_blocks_per_row, dtype=torch.int32, device=device),
        )
        self._all_tokens = torch.arange(most, device=device)

    def capture(self) -> None:
        """Capture all graphs with an empty batch, the largest first, because the others then fit into its memory."""
        for shape in sorted(self._shapes, key=lambda shape: (shape.num_tokens, shape.num_logits), reverse=True):
            self._graphs.append(_Captured(shape, *self._capture(partial(self._compute, shape))))
        self._graphs.sort(key=lambda captured: captured.shape)
        get_logger().info(
            "graphs of steps with chunks or drafts captured", sizes=sorted({shape.num_tokens for shape in self._shapes})
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Enqueue a step if a graph fits it; the arguments are those of `Model.forward`.

        Returns:
            Logits `[S, vocab_size]`, valid until the next call; None if no graph fits the step.
        """
        num_tokens, num_rows = len(input_ids), len(attention.context_lens)
        index = self._all_tokens[:num_tokens] if logits_index is None else logits_index
        several = num_rows - (num_rows if attention.max_query_len == 1 else attention.num_leading_decodes)
        needed = (num_tokens, several, len(index), num_rows)
        for captured in self._graphs:
            shape = captured.shape
            room = (shape.num_tokens, shape.num_several, shape.num_logits, shape.num_rows)
            if all(count <= most for count, most in zip(needed, room, strict=True)):
                self._send(shape, input_ids, positions, attention, index)
                captured.graph.replay()
                return captured.logits[: len(index)]
        return None

    def _send(
        self,
        shape: Shape,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        given: AttentionInputs,
        logits_index: torch.Tensor,
    ) -> None:
        """Copy a step's inputs into the graphs' tensors.

        Padding tokens keep the ids and positions of an earlier step, because they belong to no row and are not written
        to the KV cache. Entries for padding rows are set to zero, because an earlier step may have used these rows.
        """
        inputs, num_tokens = self._inputs, len(input_ids)
        num_rows, num_logits = len(given.context_lens), len(logits_index)
        first_row, end = shape.num_rows - num_rows, shape.num_rows
        inputs.input_ids[:num_tokens].copy_(input_ids)
        inputs.positions[:num_tokens].copy_(positions)
        inputs.slot_mapping[:num_tokens].copy_(given.slot_mapping)
        inputs.slot_mapping[num_tokens : shape.num_tokens].fill_(-1)
        inputs.query_start[:first_row].zero_()
        inputs.query_start[first_row : end + 1].copy_(given.query_start)
        inputs.context_lens[:first_row].zero_()
        inputs.context_lens[first_row:end].copy_(given.context_lens)
        inputs.block_tables[first_row:end, : given.block_tables.shape[1]].copy_(given.block_tables)
        inputs.logits_index[:num_logits].copy_(logits_index)
        inputs.logits_index[num_logits : shape.num_logits].zero_()

    def _compute(self, shape: Shape) -> torch.Tensor:
        inputs, num_tokens, num_rows = self._inputs, shape.num_tokens, shape.num_rows
        attention = AttentionInputs(
            slot_mapping=inputs.slot_mapping[:num_tokens],
            block_tables=inputs.block_tables[:num_rows],
            query_start=inputs.query_start[: num_rows + 1],
            context_lens=inputs.context_lens[:num_rows],
            max_query_len=num_tokens,
            num_leading_decodes=num_rows - shape.num_several,
        )
        return self._model.forward(
            inputs.input_ids[:num_tokens],
            inputs.positions[:num_tokens],
            attention,
            self._caches,
            inputs.logits_index[: shape.num_logits],
        )


def captured(steps: str, capture: Callable[[], None]) -> bool:
    """Capture graphs and return whether this succeeded; log the reason for a failure.

    The device, a library or the model may refuse the capture. Such steps then run without graphs.
    """
    try:
        with torch.inference_mode():
            capture()
    except Exception as error:
        get_logger().warning(f"{steps} are not captured as graphs", reason=f"{type(error).__name__}: {error}")
        return False
    return True
