"""Decoders of `transformers` that keep their past in a `Cache`, which here is a view of the paged KV cache.

A layer of such a decoder passes its new keys and values to `Cache.update`, and attends over what the call returns. This
module writes what is passed into the paged KV cache, and returns what is stored for the whole row. The class's own
attention does the rest, with its own mask, position biases and scaling. What is stored is up to the class: keys and
values of different sizes, or a latent vector from which the class computes both.

This serves every class whose past is in calls of `update`, but it is slower than `hf_interface`, because each step
gathers the KV of its rows. Rows with equally many tokens in a step, and with contexts of similar length, are computed
together. Their contexts are padded on the left, as for `generate` on a batch, and the attention mask excludes the
padding. Some classes that count positions themselves cannot do this, so their rows are computed one by one. The trial
at load decides.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kernels.kv_cache import read_kv, write_kv_reference
from worker_svc.model import hf_trial
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.hf_model import TransformersModel, UnsuitableError


class CacheModel(TransformersModel):
    """A decoder of `transformers` whose past is in the paged KV cache, and whose attention is its own."""

    attention = "eager"
    """Old classes ignore it and keep the default. For Falcon with ALiBi this matters: its `eager` adds ALiBi twice."""

    def __init__(self, decoder: PreTrainedModel, layers: "Layers", *, together: bool) -> None:
        """Create the model.

        Args:
            decoder: the decoder.
            layers: what each layer stores, from `probe`.
            together: compute rows together.
        """
        super().__init__(decoder, [shape for shape in layers if shape is not None])
        self._layers = layers
        self._together = together

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        last_only = logits_index is not None and bool(torch.isin(logits_index, attention.query_start[1:] - 1).all())
        kept: dict[str, Any] = {"logits_to_keep": 1} if self._keeps_logits and last_only else {}
        logits, tokens_of_logits = [], []
        hidden: torch.Tensor | None = None
        for batch in _batches(attention, caches[0][0].shape[2], together=self._together):
            placed: dict[str, Any] = {"position_ids": positions[batch.tokens]} if self.takes_positions else {}
            output = self._decoder(
                input_ids=input_ids[batch.tokens],
                attention_mask=batch.mask,
                past_key_values=Cache(layers=self._views(batch, caches)),
                use_cache=True,
                **placed,
                **kept,
            ).logits
            logits.append(output.flatten(0, 1))
            tokens_of_logits.append(batch.tokens[:, -output.shape[1] :].flatten())
            last_hidden = self._take_hidden()
            if last_hidden is not None:
                if hidden is None:
                    hidden = last_hidden.new_zeros(len(input_ids), last_hidden.shape[-1])
                hidden[batch.tokens] = last_hidden
        places = torch.zeros_like(input_ids)
        computed = torch.cat(tokens_of_logits)
        places[computed] = torch.arange(len(computed), device=places.device)
        return torch.cat(logits)[places if logits_index is None else places[logits_index]], hidden

    def _views(self, batch: "_Batch", caches: Sequence[KVCache]) -> list[Any]:
        stored = iter(caches)
        return [_View(batch, None if shape is None else next(stored)) for shape in self._layers]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows that are computed together; n rows with t tokens each, and the longest with a context of c."""

    tokens: torch.Tensor
    """`[n, t] int64`: places of the tokens in the step."""
    new_slots: torch.Tensor
    """`[n * t] int64`: slots of the tokens."""
    slots: torch.Tensor
    """`[n, c] int64`: slots of the contexts, which end together; padding repeats the first slot of a row."""
    mask: torch.Tensor
    """`[n, c] int64`: 0 for padding, else 1."""


def _batches(attention: AttentionInputs, block_size: int, *, together: bool) -> Iterator[_Batch]:
    """Yield the rows of a step, in batches of rows that are alike if `together`, else one by one."""
    starts, contexts = attention.query_start.tolist(), attention.context_lens.tolist()
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, (start, end, context) in enumerate(zip(starts, starts[1:], contexts, strict=False)):
        if context and end > start:  # others are padding of a captured graph
            # Padding is at most as long as the contexts themselves.
            alike[end - start, context.bit_length() if together else -row].append(row)
    for (num_tokens, _), rows in alike.items():
        device = attention.query_start.device
        first = torch.tensor([starts[row] for row in rows], device=device)
        tokens = first[:, None] + torch.arange(num_tokens, device=device)
        lengths = torch.tensor([contexts[row] for row in rows], device=device)
        longest = max(contexts[row] for row in rows)
        positions = torch.arange(longest, device=device) - (longest - lengths)[:, None]
        visible = positions.clamp(min=0)
        blocks = attention.block_tables[rows].long().gather(1, visible // block_size)
        yield _Batch(
            tokens,
            attention.slot_mapping[tokens.flatten()],
            blocks * block_size + visible % block_size,
            (positions >= 0).long(),
        )


class _View(CacheLayerMixin):
    """One layer of the paged KV cache, for the rows of a batch."""

    is_sliding = False  # the whole context is stored, and the mask of the class has its windows

    def __init__(self, batch: _Batch, cache: KVCache | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch = batch
        self._cache = cache
        self._length = batch.slots.shape[1] - batch.tokens.shape[1]
        self.is_initialized = self._length > 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values, each `[rows, heads, tokens, width]`, and return those of the whole contexts."""
        assert self._cache is not None, "the probe saw no call"
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        write_kv_reference(key, value, *self._cache, self._batch.new_slots)
        self._length = self._batch.slots.shape[1]
        keys, values = (read_kv(each, self._batch.slots, key.dtype).transpose(1, 2) for each in self._cache)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the length of the contexts so far, with padding."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and the position of the first one, for a call before `update`."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for no limit."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is allocated."""


Layers = tuple[KVShape | None, ...]
"""What each layer stores per token; None: nothing."""


def probe(decoder: PreTrainedModel, device: torch.device) -> Layers:
    """Return what each layer passes to `Cache.update`.

    Raises:
        UnsuitableError: no layer calls it, a layer does so twice, or attention is not causal.
    """
    if hf_trial.sees_later_tokens(decoder, device):
        raise UnsuitableError("its attention is not causal")
    cache = Cache(layer_class_to_replicate=_Recorder)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    decoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, use_cache=True)
    recorded = [layer.shapes for layer in cache.layers if isinstance(layer, _Recorder)]
    if not any(recorded):
        raise UnsuitableError("no layer stores keys and values in the cache that it is given")
    if any(len(shapes) > 1 for shapes in recorded):
        raise UnsuitableError("a layer stores keys and values twice")
    return tuple(shapes[0] if shapes else None for shapes in recorded)


class _Recorder(CacheLayerMixin):
    """Records the shapes of what a layer passes to `update`."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[KVShape] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the shapes."""
        if key_states.shape[:3] != value_states.shape[:3]:
            raise UnsuitableError("its keys and values differ in number")
        self.shapes.append(KVShape(key_states.shape[1], key_states.shape[3], value_states.shape[3]))
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return 2 after `update`, the tokens of the probe."""
        return 2 if self.shapes else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and the position of the first one."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for no limit."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: nothing is stored."""
