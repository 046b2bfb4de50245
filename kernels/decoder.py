"""Llama-type decoder on a CPU: all layers in one call.

For each layer, the decoder runs the same operations as `kernels.norm`, `linear`, `rotary`, `kv_cache`,
`paged_attention` and `activation`. It then returns logits or the last hidden states. Activations stay in float32
between the operations, so they are rounded less often than in the separate bfloat16 operations. Control does not return
to Python between layers.

    x = embedding[token]
    per layer:  x += output(attention(rotary(qk_norm(qkv(norm(x))))))
                x += down(silu(gate) * up),  gate, up = gate_up(norm(x))
                or, in a mixture of experts (`kernels.experts`), the weighted sum of several experts' MLP outputs
    logits = head(norm(x))
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from kernels.linear import PackedLinear
from kernels.native.library import Native
from kernels.native.structures import FORMATS, KV_FORMATS, PARTS, CDecoder, CLayer, CLinear, CMixture, CStep

_Reduce = CFUNCTYPE(c_int32, c_void_p, c_int64)
_MOST_REDUCED = 256
"""Maximum number of cached tensor views on memory that is summed over the ranks; later steps reuse the views."""

PHASES = ("embed", "norm", "qkv", "rotate", "attend", "output", "route", "gate_up", "activate", "down", "head")
"""Step phases for time measurement, in the order of `decoder.h`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpWeights:
    """Weights of a gated MLP."""

    gate_up: PackedLinear
    """Output rows: gate, then up."""
    down: PackedLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """Weights of a mixture of experts."""

    router: PackedLinear
    experts: Sequence[MlpWeights]
    top_k: int
    renormalise: bool
    """Whether the routing weights of a token's experts are divided by their sum."""
    shared: MlpWeights | None
    """Shared expert, which computes every token; None if the model has none."""
    shared_gate: PackedLinear | None
    """Layer with one output, the gate logit of the shared expert; None if the shared expert is not gated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Weights of one layer. Norm weights are vectors of any dtype."""

    input_norm: torch.Tensor
    qkv: PackedLinear
    """Output rows: all query heads, all key heads, all value heads."""
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: PackedLinear
    mlp_norm: torch.Tensor
    mlp: MlpWeights | MixtureWeights
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """One rank's part of a tensor-parallel decoder: some of the heads, of each MLP and of the vocabulary."""

    rank: int
    all_reduce: Callable[[torch.Tensor], object]
    """Sums a float32 vector over all ranks, in place."""
    first_token: int
    """Vocabulary index of the first row in the embedding and the LM head."""


def why_unsupported(shape: DecoderShape, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not support a decoder; None if they do."""
    if dtype not in FORMATS:
        known = ", ".join(_name(each) for each in FORMATS)
        return f"they support weights of type {known}, not {_name(dtype)}"
    # The kernels process vectors of 16 elements.
    for what, size in (("hidden_size", shape.hidden_size), ("head_dim", shape.head_dim)):
        if size % 16:
            return f"they need {what} to be a multiple of 16, not {size}"
    return None


class PackedDecoder:
    """A decoder whose weights are packed for the native kernels."""

    def __init__(
        self,
        kernels: Native,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        *,
        embedding: torch.Tensor | PackedLinear | None,
        final_norm: torch.Tensor,
        head: PackedLinear,
        cos: torch.Tensor,
        sin: torch.Tensor,
        part: DecoderPart | None = None,
    ) -> None:
        """Create a decoder from packed weights, without copying them.

        Args:
            kernels: the library that runs the decoder.
            shape: the sizes of the decoder.
            layers: the layers, in order.
            embedding: ``[vocab, hidden]`` in a dtype of `FORMATS`, or packed; None if tied to ``head``.
            final_norm: ``[hidden]``.
            head: LM head, which maps hidden states to logits.
            cos: ``[positions, rotary_dim / 2]`` float32.
            sin: as ``cos``.
            part: this rank's part, which ``shape`` and the weights describe; None if they are the whole decoder.
        """
        self._kernels = kernels
        self._part = part
        self._reduced: dict[tuple[int, int], torch.Tensor] = {}
        self._failure: BaseException | None = None
        # ctypes does not keep the callback alive, so store a reference to it.
        self._reduce = _Reduce(self._add_up) if part is not None else None
        self._kept: list[object] = [layers, embedding, head]
        self._vocab_size = head.outputs
        self._hidden_size = shape.hidden_size
        structures = (CLayer * len(layers))(*(self._layer(layer) for layer in layers))
        self._kept.append(structures)
        self._structure = CDecoder(
            num_layers=len(layers),
            layers=ctypes.addressof(structures),
            head=head.structure,
            final_norm=self._floats(final_norm),
            embedding=_address(embedding),
            embedding_format=PARTS
            if isinstance(embedding, PackedLinear)
            else 0
            if embedding is None
            else FORMATS[embedding.dtype],
            hidden=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            cos=self._floats(cos),
            sin=self._floats(sin),
            rotary_half=cos.shape[1],
            eps=shape.eps,
            scale=shape.scale,
            reduce=ctypes.cast(self._reduce, c_void_p) if self._reduce is not None else None,
            rank=0 if part is None else part.rank,
            first_token=0 if part is None else part.first_token,
        )
        self._caches: tuple[object, ctypes.Array[c_void_p], ctypes.Array[c_void_p]] | None = None
        self._groups: tuple[object, ctypes.Array[c_int64]] | None = None
        self._nanoseconds: ctypes.Array[c_int64] | None = None

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        block_tables: torch.Tensor,
        query_start: torch.Tensor,
        context_lens: torch.Tensor,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        kept_index: torch.Tensor | None,
        *,
        num_logits: int,
        groups: Sequence[int] = (),
        windowed: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step with T tokens in R rows (`kernels.paged_attention` documents the tensors).

        token_ids, positions, slot_mapping: ``[T]`` int64, contiguous.
        caches: keys and values per layer, ``[num_blocks, num_kv_heads, block_size, head_dim]``, float32 or bfloat16,
            or an int8 cache of `kernels.kv_quantised`.
        kept_index: ``[K]`` int64, tokens whose logits or hidden states are returned; None for every token.
        num_logits: return logits for the first ``num_logits`` tokens of ``kept_index``.
        groups: group of each layer; the same object in each step. Layers of group 0 use ``slot_mapping`` and
            ``block_tables``. Only used with ``windowed``.
        windowed: slot mappings ``[groups - 1, T]`` int64 and block tables ``[groups - 1, R, max_blocks]`` int32 of the
            other groups, contiguous, with as many columns as ``block_tables``. None if all layers are in group 0.

        Raises whatever the sum over the ranks raises.

        Returns:
            Logits ``[num_logits, vocab]``, and, for the other tokens, the last hidden states after the final norm ``[K
            - num_logits, hidden]``. Both are float32, regardless of the weights' type.
        """
        keys, values = self._cache_pointers(caches)
        # `len(tensor)` is slow, because it is implemented in Python.
        num_tokens = token_ids.shape[0]
        num_kept = num_tokens if kept_index is None else kept_index.shape[0]
        logits = torch.empty(num_logits, self._vocab_size)
        hidden = torch.empty(num_kept - num_logits, self._hidden_size)
        block_tables = block_tables.contiguous()
        window_slots, window_tables = (None, None) if windowed is None else (each.data_ptr() for each in windowed)
        step = CStep(
            num_tokens=num_tokens,
            num_rows=context_lens.shape[0],
            num_kept=num_kept,
            num_logits=num_logits,
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slot_mapping.data_ptr(),
            block_tables=block_tables.data_ptr(),
            table_stride=block_tables.shape[1],
            groups=None if windowed is None else self._group_numbers(groups),
            window_slots=window_slots,
            window_tables=window_tables,
            query_start=query_start.data_ptr(),
            context_lens=context_lens.data_ptr(),
            k_caches=keys,
            v_caches=values,
            kept_index=None if kept_index is None else kept_index.data_ptr(),
            logits=logits.data_ptr(),
            hidden=hidden.data_ptr(),
        )
        counted = None if self._nanoseconds is None else ctypes.addressof(self._nanoseconds)
        if not self._kernels.decoder(self._structure, step, counted):
            failure, self._failure = self._failure, None
            raise failure or RuntimeError("decoder: the sum over the ranks failed")
        return logits, hidden

    def _add_up(self, address: int, count: int) -> int:
        """Sum ``count`` float32 numbers over all ranks; return 1 after an exception, which cannot pass through C."""
        try:
            vector = self._reduced.get((address, count))
            if vector is None:
                if len(self._reduced) >= _MOST_REDUCED:
                    self._reduced.clear()
                vector = torch.frombuffer((c_float * count).from_address(address), dtype=torch.float32)
                self._reduced[address, count] = vector
            assert self._part is not None
            self._part.all_reduce(vector)
        except BaseException as error:
            self._failure = error
            return 1
        return 0

    def count_time(self) -> None:
        """Start measuring the time spent in each phase."""
        self._nanoseconds = (c_int64 * len(PHASES))()

    def counted_ns(self) -> dict[str, int]:
        """Return the nanoseconds spent in each phase since `count_time`."""
        return dict(zip(PHASES, self._nanoseconds or (), strict=False))

    def _cache_pointers(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[int, int]:
        if self._caches is None or self._caches[0] is not caches:
            first = caches[0][0]
            self._structure.cache_format = KV_FORMATS[first.dtype]
            self._structure.block_size = first.shape[2]
            keys = (c_void_p * len(caches))(*(key.data_ptr() for key, _ in caches))
            values = (c_void_p * len(caches))(*(value.data_ptr() for _, value in caches))
            self._caches = (caches, keys, values)
        _, keys, values = self._caches
        return ctypes.addressof(keys), ctypes.addressof(values)

    def _group_numbers(self, groups: Sequence[int]) -> int:
        """Return the address of the layers' groups as a C array, which is kept for the next steps."""
        if self._groups is None or self._groups[0] is not groups:
            self._groups = (groups, (c_int64 * len(groups))(*groups))
        return ctypes.addressof(self._groups[1])

    def _layer(self, layer: LayerWeights) -> CLayer:
        mixture = layer.mlp if isinstance(layer.mlp, MixtureWeights) else None
        mlp = layer.mlp if isinstance(layer.mlp, MlpWeights) else layer.mlp.shared
        return CLayer(
            input_norm=self._floats(layer.input_norm),
            mlp_norm=self._floats(layer.mlp_norm),
            query_norm=self._floats(layer.query_norm),
            key_norm=self._floats(layer.key_norm),
            qkv=_copy(layer.qkv),
            output=_copy(layer.output),
            gate_up=CLinear() if mlp is None else _copy(mlp.gate_up),
            down=CLinear() if mlp is None else _copy(mlp.down),
            mixture=None if mixture is None else self._mixture(mixture),
            sliding_window=layer.sliding_window or 0,
        )

    def _mixture(self, mixture: MixtureWeights) -> int:
        """Build the C structure for a mixture, keep it alive, and return its address."""
        experts = len(mixture.experts)
        gate_up = (CLinear * experts)(*(_copy(expert.gate_up) for expert in mixture.experts))
        down = (CLinear * experts)(*(_copy(expert.down) for expert in mixture.experts))
        structure = CMixture(
            router=_copy(mixture.router),
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            shared_gate=CLinear() if mixture.shared_gate is None else _copy(mixture.shared_gate),
            top_k=mixture.top_k,
            renormalise=mixture.renormalise,
        )
        self._kept += (gate_up, down, structure)
        return ctypes.addressof(structure)

    def _floats(self, tensor: torch.Tensor | None) -> int | None:
        """Convert a tensor to float32, keep it alive, and return its address."""
        if tensor is None:
            return None
        wide = tensor.float().contiguous()
        self._kept.append(wide)
        return wide.data_ptr()


def _address(embedding: torch.Tensor | PackedLinear | None) -> int | None:
    if isinstance(embedding, PackedLinear):
        return ctypes.addressof(embedding.structure)
    return None if embedding is None else embedding.data_ptr()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(linear: PackedLinear) -> CLinear:
    return CLinear.from_buffer_copy(linear.structure)
