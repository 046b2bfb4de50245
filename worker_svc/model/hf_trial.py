"""Trial at load: compares a decoder's logits with a paged KV cache to the logits with its own attention.

Two short rows are computed together with a small paged KV cache, in chunks and then in decode. Each is also computed
alone with the class's own attention. The first row has the first positions, and the second row has the last positions
that will be served. The trial thus detects a class whose tokens depend on the length of other rows.

Both sides compute in float32, regardless of the weights' dtype. In 16 bits, rounding alone can change a deep model's
logits, or a token's experts, more than an error does. In float32 rounding changes logits by about a millionth. The
weights are not copied: each operation converts its inputs and drops them afterwards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.decoder_config import text_config
from worker_svc.model.hf_model import TransformersModel
from worker_svc.model.recurrent import StateCounts

TOLERANCE = 1e-3
"""Largest permitted distance; hundreds of times the effect of rounding in models with random weights."""

_ROUNDING = 1e-5

_16_BITS = (torch.bfloat16, torch.float16)
_LENGTHS = (16, 13)
"""Tokens of each row."""
_TOKENS = max(_LENGTHS)
_STATES = (2, 0)
"""Rows of the recurrent states, which do not follow each other."""
_NUM_STATES = 3
_BLOCK_SIZE = 4
_CHUNKS = (((0, 7), (0, 1)), ((7, 11), (1, 8)), ((11, 15), (8, 12)), ((15, 16), (12, 13)))
"""First and last position (exclusive) for each row in each step."""


def distance(decoder: PreTrainedModel, model: TransformersModel, device: torch.device, num_positions: int) -> float:
    """Return the largest difference of two logits, relative to the largest logit.

    Args:
        decoder: the `transformers` decoder; after the call it has the attention that the model needs.
        model: the same decoder with a paged KV cache.
        device: the device of the weights.
        num_positions: length of the longest sequence in tokens.
    """
    tokens, positions = _rows(decoder, device, num_positions)
    with InFloat32():  # type: ignore[no-untyped-call]
        decoder.set_attn_implementation(model.attention)
        model.allocate_states(StateCounts(_NUM_STATES), torch.float32)
        paged = _paged_logits(model, tokens, positions, device)
        decoder.set_attn_implementation("eager")
        first, last = (slice(row, row + 1) for row in range(2))
        placed = {"position_ids": positions[last, : _LENGTHS[1]]} if model.takes_positions else {}
        own = torch.cat(
            (
                decoder(input_ids=tokens[first], use_cache=False).logits[:, -1],
                decoder(input_ids=tokens[last, : _LENGTHS[1]], use_cache=False, **placed).logits[:, -1],
            )
        )
    decoder.set_attn_implementation(model.attention)
    return float((paged - own).abs().max()) / max(float(own.abs().max()), 1e-6)


def sees_later_tokens(decoder: PreTrainedModel, device: torch.device) -> bool:
    """Return whether a token's logits depend on the next token, as in an encoder, with the class's own attention."""
    tokens, _ = _rows(decoder, device, _TOKENS)
    with InFloat32():  # type: ignore[no-untyped-call]
        logits = decoder(input_ids=tokens[:, :2], use_cache=False).logits
        others = decoder(input_ids=torch.stack((tokens[:, 0], tokens[:, 2]), 1), use_cache=False).logits
        return not bool((logits[:, 0] - others[:, 0]).abs().max() <= _ROUNDING * logits.abs().max())


def has_finite_logits(
    decoder: PreTrainedModel, model: TransformersModel, device: torch.device, num_positions: int
) -> bool:
    """Return whether both rows' logits are finite; the arguments are those of `distance`."""
    model.allocate_states(StateCounts(_NUM_STATES))
    return bool(_paged_logits(model, *_rows(decoder, device, num_positions), device).isfinite().all())


def _rows(decoder: PreTrainedModel, device: torch.device, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions of the two rows, each `[2, _TOKENS]`."""
    vocab_size = text_config(decoder.config).vocab_size
    tokens = torch.arange(1, 2 * _TOKENS + 1, device=device).remainder(vocab_size).view(2, _TOKENS)
    positions = torch.arange(_TOKENS, device=device)
    return tokens, torch.stack((positions, positions + max(0, num_positions - _TOKENS)))


def _paged_logits(model: Model, tokens: torch.Tensor, positions: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the logits of each row's last token, `[2, vocab_size]`; some classes ignore `positions`."""
    blocks_per_row = _TOKENS // _BLOCK_SIZE
    caches = [
        (torch.zeros(*places, keys, device=device), torch.zeros(*places, values, device=device))
        for places, (keys, values) in (
            ((2 * blocks_per_row, shape.num_kv_heads, _BLOCK_SIZE), shape.widths) for shape in model.kv_shapes
        )
    ]
    tables = torch.arange(2 * blocks_per_row, dtype=torch.int32, device=device).view(blocks_per_row, 2).T.contiguous()
    places = torch.arange(_TOKENS, device=device)
    slots = tables[:, places // _BLOCK_SIZE].long() * _BLOCK_SIZE + places % _BLOCK_SIZE
    logits = torch.empty(0)
    for spans in _CHUNKS:
        lengths = [end - start for start, end in spans]
        taken = [(row, slice(start, end)) for row, (start, end) in enumerate(spans)]
        attention = AttentionInputs(
            slot_mapping=torch.cat([slots[row, span] for row, span in taken]),
            block_tables=tables,
            query_start=torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=device),
            context_lens=torch.tensor([end for _, end in spans], dtype=torch.int32, device=device),
            max_query_len=max(lengths),
            rows=np.array(_STATES),
        )
        logits = model.forward(
            torch.cat([tokens[row, span] for row, span in taken]),
            torch.cat([positions[row, span] for row, span in taken]),
            attention,
            caches,
            torch.tensor([lengths[0] - 1, sum(lengths) - 1], device=device),
        )
    return logits


class InFloat32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which operations convert 16-bit inputs to float32 and return float32 instead of 16 bits."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args)) | (kwargs or {})  # noqa: B905 (some default)
        # Views and output arguments must share the original memory.
        shared = {argument.name for argument in arguments if argument.alias_info is not None}
        return func(**{name: value if name in shared else tree_map(_widened, value) for name, value in given.items()})


def _widened(value: Any) -> Any:
    """Return a 16-bit tensor as float32, a 16-bit dtype as float32, and any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.dtype in _16_BITS:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in _16_BITS else value
