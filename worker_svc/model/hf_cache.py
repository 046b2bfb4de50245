"""`transformers` decoders with a `Cache`, which this module replaces with a view of Quire's KV cache and states.

A layer of such a decoder passes its new keys and values to `Cache.update`, and attends over the returned tensors. This
module writes the passed tensors into the paged KV cache, and returns the stored tensors for the whole row. The class's
own attention does the rest, with its own mask, position biases and scaling. The class decides what to store: keys and
values of different sizes, a latent vector from which it computes both, or in addition an index of the tokens.

A layer with recurrent state reads and replaces its state in the `Cache`. Layers receive the states of a pass's rows
(`recurrent`) as views if the rows follow each other. Otherwise native kernels receive the places of the states
(`hf_recurrent`), and other layers receive a copy, which is copied back afterwards. A row that begins has no state, so
its layers start empty, as in `generate`. A row therefore never sees an earlier request's state.

This serves every class that uses a `Cache`, but is slower than `hf_interface`, because each step gathers its rows' KV.
Rows with equally many tokens in a step, and with contexts of similar length, are computed together. Their contexts are
padded on the left, as for `generate` on a batch, and the attention mask excludes the padding. Some classes that count
positions themselves cannot do this, so their rows are computed one by one. The trial at load decides.

If a class with recurrent state declares attention-backend support, its attention is replaced as in `hf_interface`. Then
`Cache.update` returns the new keys and values only, nothing is gathered, and contexts of any length are computed
together.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from kernels.kv_cache_reference import read_kv, write_kv_reference
from kernels.native.serving import native
from worker_svc.model import hf_interface, hf_trial
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.hf_attention import PAGED, PagedStep, running
from worker_svc.model.hf_model import TransformersModel, UnsuitableError
from worker_svc.model.hf_recurrent import NativeLayers, is_stand_in, stand_in, store_in
from worker_svc.model.recurrent import RowStates, StateCounts, StateSave, StateShape


class CacheModel(TransformersModel):
    """A `transformers` decoder with the paged KV cache as its `Cache`."""

    attention = "eager"
    """Old classes ignore this and keep the default. This matters for Falcon with ALiBi, whose `eager` adds ALiBi twice.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        layers: "Layers",
        *,
        together: bool,
        by_token: bool = False,
        in_place: bool = False,
        windows: "Windows | None" = None,
    ) -> None:
        """Create the model.

        Args:
            decoder: the decoder.
            layers: what each layer stores, from `probe`.
            together: compute rows together.
            by_token: compute the tokens of a row with a state one by one. Some classes, such as Mamba, ignore the state
                if a forward pass has several tokens.
            in_place: pass the places of states to native kernels, which update them.
            windows: sliding window of each layer with KV, by its index, from `hf_interface.probe_some`; None to use the
                class's own attention.
        """
        super().__init__(decoder, [shape for layer in layers for shape in (layer.kv, layer.index) if shape is not None])
        self._layers = layers
        self._together = together
        self._by_token = by_token
        self._cache_name = _cache_name(decoder)
        self._last = torch.tensor([-1], device=decoder.device)
        self._state_shapes = [part.shape for layer in layers for part in layer.states]
        self._states: RowStates | None = None
        self._windows = None if windows is None else tuple(map(windows.get, range(len(layers))))
        if windows is not None:
            self.attention = PAGED
        kernels = native() if self._state_shapes and decoder.device.type == "cpu" else None
        self._native_layers: AbstractContextManager[None] = nullcontext()
        self._in_place = [False for _ in self._state_shapes]
        if kernels is not None:
            self._native_layers = replaced = NativeLayers(decoder, kernels)
            self._in_place = [
                in_place and (replaced.replaces_convolutions if part.is_convolution else replaced.replaces_recurrences)
                for layer in layers
                for part in layer.states
            ]

    @property
    def state_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self._state_shapes)

    def allocate_states(self, counts: StateCounts, dtype: torch.dtype | None = None) -> None:
        """See `Model.allocate_states`; `dtype`: type of the states, None for the class's type."""
        if self._state_shapes:
            self._states = RowStates(self._state_shapes, counts, self._decoder.device, dtype)

    @property
    def states(self) -> RowStates | None:
        return self._states

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._states is None or attention.rows is None:
            return self._compute(input_ids, positions, attention, caches, logits_index)
        for row in attention.drafting:
            self._states.back_up(row)
        missing = [self._states.missing.pop(row, []) for row in attention.rows.tolist()]
        if not any(missing):
            return self._compute(input_ids, positions, attention, caches, logits_index)
        longer = _with_missing(input_ids, positions, attention, missing)
        places = longer.places if logits_index is None else longer.places[logits_index]
        logits, hidden = self._compute(longer.input_ids, longer.positions, longer.attention, caches, places)
        return logits, None if hidden is None else hidden[longer.places]

    def _compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        last_only = logits_index is not None and bool(torch.isin(logits_index, attention.query_start[1:] - 1).all())
        # Some classes compute hidden states of the last token only if this is a number.
        kept: dict[str, Any] = {"logits_to_keep": self._last} if self._keeps_logits and last_only else {}
        logits, tokens_of_logits = [], []
        hidden: torch.Tensor | None = None
        for batch in self._batches(attention, caches):
            placed: dict[str, Any] = {"position_ids": positions[batch.tokens]} if self.takes_positions else {}
            cache = Cache(layers=self._views(batch, caches))
            self._load_states(batch, cache)
            with self._native_layers, self._attending(batch, attention, caches):
                output = self._decoder(
                    input_ids=input_ids[batch.tokens],
                    attention_mask=batch.mask,
                    use_cache=True,
                    **{self._cache_name: cache},
                    **placed,
                    **kept,
                ).logits
            self._store_states(batch, cache)
            if self._states is not None:
                for save in batch.saves:
                    self._states.save(save)
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

    def _attending(
        self, batch: "_Batch", attention: AttentionInputs, caches: Sequence[KVCache]
    ) -> AbstractContextManager[None]:
        if self._windows is None:
            return nullcontext()
        num_rows, num_tokens = batch.tokens.shape
        device = batch.tokens.device
        inputs = AttentionInputs(
            slot_mapping=batch.new_slots,
            block_tables=attention.block_tables[batch.places],
            query_start=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * num_tokens,
            context_lens=torch.tensor(batch.ends, dtype=torch.int32, device=device),
            max_query_len=num_tokens,
            min_query_len=num_tokens,
        )
        stored = iter(caches)
        by_layer = [None if layer.kv is None else next(stored) for layer in self._layers]
        return running(PagedStep(inputs, by_layer, self._windows))

    def _batches(self, attention: AttentionInputs, caches: Sequence[KVCache]) -> Iterator["_Batch"]:
        """Yield a step's tokens in batches of similar rows, or row by row if rows must be computed alone.

        A row's batches follow the order of its tokens. A row that shares blocks which another row writes in this step
        follows that row.
        """
        alike: dict[tuple[int, int, int, bool, int], list[_Span]] = defaultdict(list)
        depths = _depths(attention, caches)
        for span in self._spans(attention):
            # With the class's own attention, there are at most as many padding tokens as context tokens.
            padded = caches and self._windows is None
            length = (span.end.bit_length() if padded else 0) if self._together else -span.place
            has_state = bool(self._state_shapes) and span.end > span.num_tokens
            alike[depths[span.place], span.turn, span.num_tokens, has_state, length].append(span)
        device = attention.query_start.device
        for (_, _, num_tokens, has_state, _), spans in sorted(alike.items(), key=lambda each: each[0][:2]):
            if attention.rows is not None:
                spans.sort(key=lambda span: int(attention.rows[span.place]))  # type: ignore[index]
            first = torch.tensor([span.first for span in spans], device=device)
            tokens = first[:, None] + torch.arange(num_tokens, device=device)
            places, ends = [span.place for span in spans], [span.end for span in spans]
            slots, mask = _context(attention, places, ends, caches if self._windows is None else ())
            yield _Batch(
                tokens=tokens,
                places=places,
                new_slots=attention.slot_mapping[tokens.flatten()],
                slots=slots,
                mask=mask,
                rows=None if attention.rows is None else attention.rows[places].tolist(),
                ends=ends,
                has_state=has_state,
                saves=[save for span in spans for save in span.saves],
            )

    def _spans(self, attention: AttentionInputs) -> Iterator["_Span"]:
        """Yield each row's tokens in a step, as one span or, with `by_token`, as one span per token."""
        starts, contexts = attention.query_start.tolist(), attention.context_lens.tolist()
        for place, (start, end, context) in enumerate(zip(starts, starts[1:], contexts, strict=False)):
            if not context or end == start:  # This row is padding in a captured graph.
                continue
            saves = self._saves_of(attention, place)
            num_before = context - (end - start)
            turn, first = 0, start
            for last in [*(start + save.length - num_before for save in saves if save.length < context), end]:
                by_token = self._by_token and num_before + first - start > 0
                for begin in range(first, last) if by_token else (first,):
                    stop = begin + 1 if by_token else last
                    length = num_before + stop - start
                    due = tuple(save for save in saves if save.length == length)
                    yield _Span(turn, place, begin, stop - begin, length, due)
                    turn += 1
                first = last

    def _saves_of(self, attention: AttentionInputs, place: int) -> list[StateSave]:
        """Return the saves of a row within the step, ascending by length."""
        if not attention.saves or attention.rows is None:
            return []
        row = int(attention.rows[place])
        return sorted((save for save in attention.saves if save.row == row), key=lambda save: save.length)

    def _views(self, batch: "_Batch", caches: Sequence[KVCache]) -> list[Any]:
        stored = iter(caches)
        views: list[Any] = []
        for layer in self._layers:
            cache = None if layer.kv is None else next(stored)
            index = None if layer.index is None else next(stored)
            paged = self._windows is not None
            if not layer.num_states:
                views.append(_View(batch, cache, paged=paged) if index is None else _IndexedView(batch, cache, index))
            elif layer.kv is None:
                views.append(_StateView(layer.num_states))
            else:
                views.append(_HybridView(batch, cache, layer.num_states, paged=paged))
        return views

    def _load_states(self, batch: "_Batch", cache: Cache) -> None:
        """Pass the rows' states to the layers; layers without a state begin empty."""
        if not batch.has_state:
            return
        if self._states is None or batch.rows is None:
            raise RuntimeError("recurrent state: rows without a state must begin with their first token")
        starts = [end - batch.tokens.shape[1] for end in batch.ends]
        opened = self._states.open(batch.rows, starts)
        parts = ((part, view) for layer, view in zip(self._layers, cache.layers, strict=True) for part in layer.states)
        for (part, view), tensor, in_place in zip(parts, opened.tensors, self._in_place, strict=True):
            if opened.span is not None:
                part.load(view, tensor[opened.span])
            elif in_place:
                part.load(view, stand_in(tensor, opened.places))
            else:
                part.load(view, tensor.index_select(0, opened.places))

    def _store_states(self, batch: "_Batch", cache: Cache) -> None:
        """Store the states that the layers did not update in place."""
        if self._states is None or batch.rows is None:
            return
        self._states.close(
            batch.rows,
            batch.ends,
            [
                None if is_stand_in(state) else state
                for layer, view in zip(self._layers, cache.layers, strict=True)
                for state in (part.of(view) for part in layer.states)
            ],
        )


@dataclass(frozen=True, slots=True)
class _LongerStep:
    """A step whose rows begin with their missing tokens."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionInputs
    places: torch.Tensor
    """`[T] int64`: places of the step's own tokens."""


def _with_missing(
    input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionInputs, missing: Sequence[list[int]]
) -> _LongerStep:
    """Return a step in which each row has its missing tokens first. Their KV is stored already."""
    device, starts = input_ids.device, attention.query_start.tolist()
    ids, places, slots, where = [], [], [], []
    num_before = 0
    for (start, end), tokens in zip(pairwise(starts), missing, strict=True):
        count = len(tokens)
        ids += [input_ids.new_tensor(tokens), input_ids[start:end]]
        places += [positions[start : start + 1] + torch.arange(-count, 0, device=device), positions[start:end]]
        slots += [attention.slot_mapping.new_full((count,), -1), attention.slot_mapping[start:end]]
        num_before += count
        where.append(torch.arange(start, end, device=device) + num_before)
    lengths = [end - start + len(tokens) for (start, end), tokens in zip(pairwise(starts), missing, strict=True)]
    longer = replace(
        attention,
        slot_mapping=torch.cat(slots),
        query_start=attention.query_start.new_tensor([0, *accumulate(lengths)]),
        max_query_len=max(lengths),
        min_query_len=min(lengths),
        num_leading_decodes=0,
    )
    return _LongerStep(torch.cat(ids), torch.cat(places), longer, torch.cat(where))


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of one row that are computed in one forward pass."""

    turn: int
    """Number of the row's earlier spans in the step."""
    place: int
    """Place of the row in the step."""
    first: int
    """Place of the first token in the step."""
    num_tokens: int
    end: int
    """Length of the row's context up to this span's last token."""
    saves: tuple[StateSave, ...] = ()
    """Saves of the row's state after the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Rows that are computed together: n rows with t tokens each, and a longest context of c."""

    tokens: torch.Tensor
    """`[n, t] int64`: places of the tokens in the step."""
    places: list[int]
    """Places of the rows in the step."""
    new_slots: torch.Tensor
    """`[n * t] int64`: slots of the tokens."""
    slots: torch.Tensor
    """`[n, c] int64`: the contexts' slots, aligned at the end; padding repeats a row's first slot.

    `[n, 0]` if the class's own attention is not used.
    """
    mask: torch.Tensor | None
    """`[n, c] int64`: 0 for padding, else 1; None if the class's own attention is not used."""
    rows: list[int] | None
    """Indices of the rows' states; None if the states are not kept."""
    ends: list[int]
    """Length of each context."""
    has_state: bool
    """Whether the rows have a state: the model has one, and the tokens are not the first ones."""
    saves: list[StateSave]
    """States to save after the forward pass."""


def _depths(attention: AttentionInputs, caches: Sequence[KVCache]) -> list[int]:
    """Return for each row how many rows must be computed before it, one after the other.

    The scheduler may admit a row with blocks that another row fills in the same step, because a step usually writes the
    keys and values of all rows before attention reads them.
    """
    starts, contexts = attention.query_start.tolist(), attention.context_lens.tolist()
    depths = [0] * len(contexts)
    if not caches or max((end - start for start, end in pairwise(starts)), default=0) < 2:
        return depths  # A row that computes one token fills no block that another row shares already.
    block_size = caches[0][0].shape[2]
    tables = attention.block_tables.tolist()
    blocks = [table[: -(-context // block_size)] for table, context in zip(tables, contexts, strict=True)]
    writers: dict[int, int] = {}
    for place, (start, end) in enumerate(pairwise(starts)):
        first = (contexts[place] - (end - start)) // block_size
        writers |= dict.fromkeys(blocks[place][first:], place)
    # A row's context begins with blocks of rows that do not depend on it, so that one pass per row is enough.
    for _ in range(len(blocks)):
        before = depths.copy()
        for place, read in enumerate(blocks):
            others = {writers.get(block, place) for block in read} - {place}
            depths[place] = max((depths[other] + 1 for other in others), default=0)
        if depths == before:
            break
    return depths


def _context(
    attention: AttentionInputs, places: list[int], contexts: list[int], caches: Sequence[KVCache]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `_Batch.slots` and `_Batch.mask` for some rows of a step."""
    device = attention.query_start.device
    if not caches:
        return torch.zeros(len(places), 0, dtype=torch.int64, device=device), None
    block_size = caches[0][0].shape[2]
    longest = max(contexts)
    lengths = torch.tensor(contexts, device=device)
    positions = torch.arange(longest, device=device) - (longest - lengths)[:, None]
    visible = positions.clamp(min=0)
    blocks = attention.block_tables[places].long().gather(1, visible // block_size)
    return blocks * block_size + visible % block_size, (positions >= 0).long()


class _View(CacheLayerMixin):
    """One layer of the paged KV cache, for a batch's rows."""

    is_sliding = False  # The whole context is stored. The class applies windows in its mask.

    def __init__(self, batch: _Batch, cache: KVCache | None, *, paged: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._open(batch, cache, paged=paged)

    def _open(self, batch: _Batch, cache: KVCache | None, *, paged: bool) -> None:
        self._batch = batch
        self._cache = cache
        self._paged = paged
        self._end = max(batch.ends) if paged else batch.slots.shape[1]
        self._length = self._end - batch.tokens.shape[1]
        self.is_initialized = self._length > 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values, each `[rows, heads, tokens, width]`, and return those of the whole contexts.

        With paged attention, return the new ones, which the attention function writes.
        """
        assert self._cache is not None, "the probe saw no call"
        if self._paged:
            self._length = self._end
            return key_states, value_states
        key, value = (states.transpose(1, 2).flatten(0, 1) for states in (key_states, value_states))
        write_kv_reference(key, value, *self._cache, self._batch.new_slots)
        self._length = self._end
        keys, values = (read_kv(each, self._batch.slots, key.dtype).transpose(1, 2) for each in self._cache)
        return keys, values

    def get_seq_length(self) -> int:
        """Return the length of the contexts so far, with padding."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys, and the first key's position, for a call before `update`."""
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for no limit."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the pool is allocated."""


class _IndexedView(_View):  # type: ignore[no-untyped-call]
    """A layer that also stores an index: one vector per token, by which queries select tokens."""

    def __init__(self, batch: _Batch, cache: KVCache | None, index: KVCache) -> None:
        super().__init__(batch, cache)
        self._index = index

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write vectors `[rows, tokens, width]`, and return those of the whole contexts."""
        new = indexer_key_states.flatten(0, 1)[:, None]
        keys, values = new.tensor_split([_index_shape(new.shape[-1]).head_dim], dim=-1)
        write_kv_reference(keys, values, *self._index, self._batch.new_slots)
        return torch.cat([read_kv(each, self._batch.slots, new.dtype)[:, :, 0] for each in self._index], dim=-1)


def _index_shape(width: int) -> KVShape:
    """Return the shape of an index with vectors of this width: half of a vector is stored as a key, half as a value."""
    return KVShape(1, width // 2, width - width // 2)


class _StateView(LinearAttentionLayer):
    """A layer with recurrent state, which may be in place (`hf_recurrent`)."""

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        """Replace the state; return the new one."""
        state: Any = self.recurrent_states.get(state_idx)
        if state is None or not is_stand_in(state):
            self.recurrent_states[state_idx] = recurrent_states
            self.is_recurrent_states_initialized[state_idx] = True
        elif recurrent_states is not state:
            store_in(state, recurrent_states)
        return recurrent_states

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Add new inputs `[rows, channels, tokens]` to the state; return them after the previous state."""
        if not self.has_previous_state[state_idx]:
            return super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        state: Any = self.conv_states[state_idx]
        past = state.states.index_select(0, state.places) if is_stand_in(state) else state
        # The memory is in the order of the tokens, as in `conv_states`.
        inputs = torch.cat((past.transpose(1, 2), conv_states.transpose(1, 2)), dim=1).transpose(1, 2)
        newest = inputs[..., -state.shape[-1] :]
        if is_stand_in(state):
            store_in(state, newest)
        else:
            state.copy_(newest)
        return inputs


class _HybridView(_StateView, _View):  # type: ignore[override]
    """A layer with recurrent state, and with keys and values in the paged KV cache."""

    def __init__(self, batch: _Batch, cache: KVCache | None, num_states: int, *, paged: bool) -> None:
        LinearAttentionLayer.__init__(self, num_states)  # type: ignore[no-untyped-call]
        self._open(batch, cache, paged=paged)


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a layer's recurrent state, by its place in `LinearAttentionLayer`."""

    index: int
    is_convolution: bool
    shape: StateShape

    def of(self, layer: Any) -> torch.Tensor:
        """Return the tensor of a layer, `[rows, *shape]`."""
        return layer.conv_states[self.index] if self.is_convolution else layer.recurrent_states[self.index]  # type: ignore[no-any-return]

    def load(self, layer: Any, state: torch.Tensor) -> None:
        """Set the tensor of a layer, as after a forward pass with the tokens before."""
        layer.has_previous_state[self.index] = True
        if self.is_convolution:
            layer.conv_states[self.index] = state
            layer.conv_kernel_size[self.index] = state.shape[-1]
            layer.is_conv_states_initialized[self.index] = True
            layer.dtype, layer.device = state.dtype, state.device
        else:
            layer.recurrent_states[self.index] = state
            layer.is_recurrent_states_initialized[self.index] = True


@dataclass(frozen=True, slots=True)
class LayerPast:
    """What one layer stores."""

    kv: KVShape | None
    """Keys and values per token; None: nothing."""
    index: KVShape | None = None
    """The index, see `_IndexedView`; None: nothing."""
    num_states: int = 0
    """Number of states in the layer's class; 0 if it has no recurrent state."""
    states: tuple[StatePart, ...] = ()


Layers = tuple[LayerPast, ...]

Windows = Mapping[int, int | None]
"""Sliding windows, by layer; None for a layer that attends to the whole context."""

STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Kinds of layers with recurrent state, as `transformers` names them."""
INDEXED_LAYERS = frozenset({"indexed_attention"})
"""Kinds of layers with an index."""


def keeps_state(config: PretrainedConfig) -> bool:
    """Return whether the cache of a decoder has recurrent state, as far as its configuration shows."""
    return not STATE_LAYERS.isdisjoint(getattr(config, "layer_types", None) or ())


def probe(decoder: PreTrainedModel, device: torch.device) -> Layers:
    """Return what each layer stores in the cache that it is given.

    Raises:
        UnsuitableError: no layer stores anything, a layer stores keys and values twice, or attention is not causal.
    """
    if hf_trial.sees_later_tokens(decoder, device):
        raise UnsuitableError("its attention is not causal")
    cache = _recording_cache(decoder.config)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    decoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True, **{_cache_name(decoder): cache})
    layers = tuple(map(_recorded, cache.layers))
    if not any(layer.kv or layer.states for layer in layers):
        raise UnsuitableError("no layer stores keys and values in the cache that it is given")
    return layers


def probe_windows(decoder: PreTrainedModel, layers: Layers, device: torch.device) -> Windows:
    """Return the sliding windows of the layers with keys and values, for paged attention.

    Raises:
        UnsuitableError: paged attention does not compute a layer.
    """
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsuitableError("its class takes no positions")
    calls = hf_interface.probe_some(decoder, device)
    stored = {index: layer.kv for index, layer in enumerate(layers) if layer.kv is not None}
    called = {index: call.kv_shape for index, call in calls.items()}
    if not stored or {index: (kv.num_kv_heads, *kv.widths) for index, kv in stored.items()} != {
        index: (kv.num_kv_heads, *kv.widths) for index, kv in called.items()
    }:
        raise UnsuitableError("its layers do not call attention with the keys and values that they store")
    return {index: call.sliding_window for index, call in calls.items()}


def _cache_name(decoder: PreTrainedModel) -> str:
    """Return the name of the argument with the cache."""
    return "cache_params" if "cache_params" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _recording_cache(config: PretrainedConfig) -> Cache:
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds.isdisjoint(STATE_LAYERS | INDEXED_LAYERS):
        return Cache(layer_class_to_replicate=_Recorder)
    layers: list[Any] = []
    for layer in DynamicCache(config=config).layers:
        has_kv = isinstance(layer, CacheLayerMixin)
        if not isinstance(layer, LinearAttentionCacheLayerMixin):
            layers.append(_Recorder())
        elif has_kv:
            layers.append(_HybridRecorder(layer.number_of_states))
        else:
            layers.append(LinearAttentionLayer(layer.number_of_states))
    return Cache(layers=layers)


def _recorded(layer: Any) -> LayerPast:
    shapes = layer.shapes if isinstance(layer, _Recorder) else []
    if len(shapes) > 1:
        raise UnsuitableError("a layer stores keys and values twice")
    kv = shapes[0] if shapes else None
    if not isinstance(layer, LinearAttentionLayer):
        width = layer.index_width if isinstance(layer, _Recorder) else 0
        return LayerPast(kv, _index_shape(width) if width else None)
    parts = [
        StatePart(index, is_convolution, StateShape(tuple(state.shape[1:]), state.dtype))
        for is_convolution, states in ((True, layer.conv_states), (False, layer.recurrent_states))
        for index, state in states.items()
        if state is not None
    ]
    return LayerPast(kv, num_states=layer.number_of_states, states=tuple(parts))


class _Recorder(CacheLayerMixin):
    """Records the shapes of what a layer passes to `update`."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[KVShape] = []
        self.index_width = 0

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Record the width of the index."""
        self.index_width = indexer_key_states.shape[-1]
        return indexer_key_states

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
        """Return the number of keys, and the first key's position."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which stands for no limit."""
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: nothing is stored."""


class _HybridRecorder(LinearAttentionLayer, _Recorder):  # type: ignore[override]
    """Records the shapes of keys and values in a layer that also has recurrent state."""

    def __init__(self, num_states: int) -> None:
        LinearAttentionLayer.__init__(self, num_states)  # type: ignore[no-untyped-call]
        self.shapes = []
