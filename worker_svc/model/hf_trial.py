"""Trial at load: compares a decoder's logits with a paged KV cache to those of its own attention.

Two short rows are computed together in chunks with a small paged KV cache, and each alone with the attention of the
decoder's class. The first row has the first positions, the second one the last positions that will be served. So a
class whose tokens depend on the length of other rows is found.

Both sides compute in float32, for every dtype of the weights. In 16 bits, rounding alone can change the logits of a
deep model, or the experts of a mixture-of-experts model, more than an error does. In float32 rounding changes logits by
about a millionth. The weights are not copied: each operation converts its inputs and drops them afterwards.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.decoder_config import text_config
from worker_svc.model.hf_attention import PAGED

TOLERANCE = 1e-3
"""Largest distance that passes; hundreds of times the distance that rounding causes in models with random weights."""

_16_BITS = (torch.bfloat16, torch.float16)
_TOKENS = 12
"""Tokens of each row."""
_BLOCK_SIZE = 4
_CHUNKS = (((0, 7), (0, 1)), ((7, _TOKENS), (1, _TOKENS)))
"""First and last position (exclusive) of each row in each step."""


def distance(decoder: PreTrainedModel, model: Model, device: torch.device, num_positions: int) -> float:
    """Return the largest difference of two logits, relative to the largest logit.

    Args:
        decoder: the decoder of `transformers`; its attention is `PAGED` before and after the call.
        model: the same decoder with a paged KV cache.
        device: the device of the weights.
        num_positions: length of the longest sequence in tokens.
    """
    tokens, positions = _rows(decoder, device, num_positions)
    with InFloat32():  # type: ignore[no-untyped-call]
        paged = _paged_logits(model, tokens, positions, device)
        decoder.set_attn_implementation("eager")
        first = decoder(input_ids=tokens[:1], use_cache=False)
        last = decoder(input_ids=tokens[1:], position_ids=positions[1:], use_cache=False)
        own = torch.cat((first.logits[:, -1], last.logits[:, -1]))
    decoder.set_attn_implementation(PAGED)
    return float((paged - own).abs().max()) / max(float(own.abs().max()), 1e-6)


def has_finite_logits(decoder: PreTrainedModel, model: Model, device: torch.device, num_positions: int) -> bool:
    """Return whether the logits of the two rows are finite; the arguments are those of `distance`."""
    return bool(_paged_logits(model, *_rows(decoder, device, num_positions), device).isfinite().all())


def _rows(decoder: PreTrainedModel, device: torch.device, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions of the two rows, each `[2, _TOKENS]`."""
    vocab_size = text_config(decoder.config).vocab_size
    tokens = torch.arange(1, 2 * _TOKENS + 1, device=device).remainder(vocab_size).view(2, _TOKENS)
    positions = torch.arange(_TOKENS, device=device)
    return tokens, torch.stack((positions, positions + max(0, num_positions - _TOKENS)))


def _paged_logits(model: Model, tokens: torch.Tensor, positions: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the logits of the last token of each row, `[2, vocab_size]`."""
    blocks_per_row = _TOKENS // _BLOCK_SIZE
    caches = [
        (torch.zeros(size, device=device), torch.zeros(size, device=device))
        for size in ((2 * blocks_per_row, s.num_kv_heads, _BLOCK_SIZE, s.head_dim) for s in model.kv_shapes)
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
        # A view, or an output argument, must keep its memory.
        shared = {argument.name for argument in arguments if argument.alias_info is not None}
        return func(**{name: value if name in shared else tree_map(_widened, value) for name, value in given.items()})


def _widened(value: Any) -> Any:
    """Return a 16-bit tensor as float32, a 16-bit dtype as float32, and any other value unchanged."""
    if isinstance(value, torch.Tensor) and value.dtype in _16_BITS:
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) and value in _16_BITS else value
