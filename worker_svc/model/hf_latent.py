"""Latent attention of `transformers` decoders (DeepSeek V2 and V3, Kimi K2, GLM-4.7-flash and others).

A layer of such a decoder computes one latent vector and one rotary key per token and passes them to `Cache.update`.
Then `expand_kv` expands them to the keys and values of all heads. `prepare` replaces `expand_kv`. In a step with paged
attention the replacement returns its arguments, so that they reach the attention function (`hf_attention`). That
function stores them and attends over them (`kernels.latent_attention`). Outside of such a step, for example in the
reference pass of the trial, the class expands them as before.

A row with few tokens, as in decode, reads nothing but latent vectors. On a CPU, a long chunk expands the latent vectors
of its row if this takes fewer multiplications.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from transformers import PreTrainedModel

from kernels.kv_cache_reference import read_kv
from kernels.latent_attention import HeadProjections, latent_attention
from kernels.paged_attention import paged_attention
from worker_svc.model.base import AttentionInputs, KVCache

_EXPANDED_BYTES = 1 << 30
"""Largest size of the expanded keys and values of a row; a longer row is not expanded."""
_LEAST_TOKENS = 12
"""Shortest chunk that is expanded. Drafts are computed like decode, so that they do not change a token's rounding."""

_STORED: ContextVar[bool] = ContextVar("quire_latent_stored", default=False)


@contextmanager
def unexpanded() -> Iterator[None]:
    """Make the layers of prepared decoders pass latent vectors to attention within the context."""
    token = _STORED.set(True)
    try:
        yield
    finally:
        _STORED.reset(token)


class LatentLayer:
    """One layer's `expand_kv`, and its projections from latent vectors to keys and values."""

    def __init__(self, module: Any) -> None:
        self._expand = module.expand_kv
        self._module = module
        self.value_dim = int(module.v_head_dim)
        """Elements of a value of one head."""
        self.num_heads = module.kv_b_proj.weight.shape[0] // (module.qk_nope_head_dim + self.value_dim)
        self._projections = HeadProjections.of(module.kv_b_proj.weight, self.num_heads, self.value_dim)

    def __call__(self, latent: torch.Tensor, rotary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, or the arguments within `unexpanded`."""
        return (latent, rotary) if _STORED.get() else self._expand(latent, rotary)

    def pack(self) -> None:
        """Copy the projections into the layout of the native kernels, if they are used."""
        self._projections = self._projections.for_serving()

    def quantise(self) -> None:
        """Use the weights of the quantised `kv_b_proj`, so that expanded chunks and decode compute the same."""
        projection = self._module.kv_b_proj
        weight = projection(torch.eye(projection.in_features, dtype=projection.weight.dtype)).T.contiguous()
        self._projections = HeadProjections.of(weight, self.num_heads, self.value_dim).for_serving()

    def attend(self, query: torch.Tensor, cache: KVCache, attention: AttentionInputs, scale: float) -> torch.Tensor:
        """Compute attention over stored latent vectors.

        Args:
            query: `[T, num_heads, key_dim + rotary_dim]`.
            cache: latent vectors and rotary keys, with those of this step.
            attention: the step's tokens.
            scale: factor of the scores.

        Returns:
            `[T, num_heads, value_dim]` in the dtype of `query`.
        """
        chunks = [] if query.is_cuda or attention.max_query_len == 1 else self._expanded_rows(query, cache, attention)
        if not chunks:
            return self._attend_absorbed(query, cache, attention, scale)
        out = query.new_empty(len(query), self.num_heads, self.value_dim)
        for row, tokens in chunks:
            out[tokens] = self._attend_expanded(query[tokens], cache, attention, row, scale)
        others, index = _without(attention, {row for row, _ in chunks})
        if len(index):
            out[index] = self._attend_absorbed(query[index], cache, others, scale)
        return out

    def _expanded_rows(
        self, query: torch.Tensor, cache: KVCache, attention: AttentionInputs
    ) -> list[tuple[int, slice]]:
        """Return the rows whose latent vectors are to be expanded, and their tokens."""
        rank, rotary_dim = cache[0].shape[3], cache[1].shape[3]
        contexts = attention.context_lens.tolist()
        return [
            (row, slice(start, end))
            for row, (start, end) in enumerate(pairwise(attention.query_start.tolist()))
            if expands(end - start, contexts[row], self.num_heads, rank, rotary_dim, query.shape[2], self.value_dim)
        ]

    def _attend_absorbed(
        self, query: torch.Tensor, cache: KVCache, attention: AttentionInputs, scale: float
    ) -> torch.Tensor:
        attended = latent_attention(
            self._projections.absorb(query),
            *cache,
            attention.block_tables,
            attention.query_start,
            attention.context_lens,
            max_query_len=attention.max_query_len,
            scale=scale,
        )
        return self._projections.values_of(attended, query.dtype)

    def _attend_expanded(
        self, query: torch.Tensor, cache: KVCache, attention: AttentionInputs, row: int, scale: float
    ) -> torch.Tensor:
        context, block_size = int(attention.context_lens[row]), cache[0].shape[2]
        positions = torch.arange(context)
        slots = attention.block_tables[row].long()[positions // block_size] * block_size + positions % block_size
        latents, rotaries = (read_kv(each, slots, query.dtype)[:, 0] for each in cache)
        expanded = self._module.kv_b_proj(latents).view(context, self.num_heads, -1).transpose(0, 1)
        key_dim = expanded.shape[2] - self.value_dim
        # One block with the whole row. Values are padded, because they have the size of keys there.
        keys = query.new_empty(1, self.num_heads, context, query.shape[2])
        keys[0, :, :, :key_dim] = expanded[..., :key_dim]
        keys[0, :, :, key_dim:] = rotaries
        values = query.new_zeros(1, self.num_heads, context, max(query.shape[2], self.value_dim))
        values[0, :, :, : self.value_dim] = expanded[..., key_dim:]
        if values.shape[3] > keys.shape[3]:
            keys, query = (
                torch.nn.functional.pad(each, (0, values.shape[3] - each.shape[-1])) for each in (keys, query)
            )
        start = torch.tensor([0, len(query)], dtype=torch.int32)
        table = torch.zeros(1, 1, dtype=torch.int32)
        lengths = attention.context_lens[row : row + 1].contiguous()
        out = paged_attention(
            query.contiguous(), keys, values, table, start, lengths, max_query_len=len(query), scale=scale
        )
        return out[..., : self.value_dim]


def expands(
    tokens: int, context: int, num_heads: int, rank: int, rotary_dim: int, query_dim: int, value_dim: int
) -> bool:
    """Return whether a chunk is computed with fewer multiplications if its row's latent vectors are expanded.

    Args:
        tokens: tokens of the chunk.
        context: tokens of the row with the chunk.
        num_heads: number of heads.
        rank: elements of a latent vector.
        rotary_dim: elements of a rotary key.
        query_dim: elements of a query.
        value_dim: elements of a value.
    """
    if tokens < _LEAST_TOKENS:
        return False
    seen = tokens * (context - tokens / 2)  # pairs of a query and a key
    width = max(query_dim, value_dim)
    absorbed = seen * (2 * rank + rotary_dim) + tokens * rank * (query_dim - rotary_dim + value_dim)
    expanded = seen * 2 * width + context * rank * (query_dim - rotary_dim + value_dim)
    return expanded < absorbed and context * num_heads * 2 * width * 4 <= _EXPANDED_BYTES


def _without(attention: AttentionInputs, rows: set[int]) -> tuple[AttentionInputs, torch.Tensor]:
    """Return a step without some rows, and the places of its tokens in the whole step."""
    starts = attention.query_start.tolist()
    kept = [row for row in range(len(starts) - 1) if row not in rows]
    lengths = [starts[row + 1] - starts[row] for row in kept]
    index = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in kept] or [torch.arange(0)])
    return (
        AttentionInputs(
            slot_mapping=attention.slot_mapping[index],
            block_tables=attention.block_tables[kept],
            query_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32),
            context_lens=attention.context_lens[kept],
            max_query_len=max(lengths, default=1),
        ),
        index,
    )


def layer_of(module: torch.nn.Module) -> LatentLayer | None:
    """Return the latent layer of a prepared attention module; None for any other module."""
    layer = vars(module).get("expand_kv")
    return layer if isinstance(layer, LatentLayer) else None


def prepare(decoder: PreTrainedModel) -> None:
    """Replace `expand_kv` in the attention modules of a decoder."""
    for module in decoder.modules():
        if _is_latent(module):
            module.expand_kv = LatentLayer(module)  # type: ignore[assignment]


def pack(decoder: PreTrainedModel) -> None:
    """Copy the projections of all latent layers into the layout of the native kernels, if these are used.

    Call this before the other weights are packed, because the projections are views of a linear layer's weight.
    """
    for layer in _layers(decoder):
        layer.pack()


def quantise(decoder: PreTrainedModel) -> None:
    """Use the values of the quantised weights in all latent layers. Call this after the linear layers are quantised."""
    for layer in _layers(decoder):
        layer.quantise()


def restore(decoder: PreTrainedModel) -> None:
    """Undo `prepare`."""
    for module in decoder.modules():
        if layer_of(module) is not None:
            del module.expand_kv


def _layers(decoder: PreTrainedModel) -> Sequence[LatentLayer]:
    return [layer for layer in map(layer_of, decoder.modules()) if layer is not None]


def _is_latent(module: Any) -> bool:
    weight = getattr(getattr(module, "kv_b_proj", None), "weight", None)
    return (
        isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and module.kv_b_proj.bias is None
        and callable(getattr(module, "expand_kv", None))
        and all(isinstance(getattr(module, name, None), int) for name in ("qk_nope_head_dim", "v_head_dim"))
    )
