"""Attention functions that replace those of `transformers` decoders.

`transformers` finds attention functions by name (`AttentionInterface`). This module registers two names:

* `PAGED` writes keys and values to the paged KV cache and attends over it. It has no mask function, so that
  `transformers` builds no mask. This saves work and, on CUDA, a synchronisation in every step. Layers with latent
  attention (`hf_latent`) pass latent vectors and rotary keys instead.
* `PROBE` computes nothing and records the arguments of each layer's call. Its mask function returns the size of the
  sliding window instead of a mask, because some layers get their window only through the mask.

A step's inputs are passed in a context variable, because `transformers` defines the functions' arguments.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from kernels.kv_cache import write_kv
from kernels.paged_attention import DecodeSchedule, paged_attention
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.hf_latent import layer_of, unexpanded

PAGED = "quire_paged"
PROBE = "quire_probe"

_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings"})
"""Tensor arguments to attention functions that do not affect the result."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """Arguments of one layer's call to the attention function."""

    layer: int | None
    num_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    causal: bool
    unknown: tuple[str, ...]
    """Tensor arguments that may change the result and that paged attention does not support."""
    latent: bool = False
    """Whether keys and values are latent vectors and rotary keys."""
    source: int | None = None
    """The earlier layer whose keys and values this layer uses; None if it has its own."""

    @property
    def kv_shape(self) -> KVShape:
        """What the layer stores per token."""
        return KVShape(self.num_kv_heads, self.head_dim, self.value_dim if self.latent else 0)


@dataclass(slots=True)
class Recording:
    """Attention calls of one forward pass, in order."""

    calls: list[LayerCall] = field(default_factory=list)
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Keys and values of each layer that has its own."""

    def source(self, layer: int | None, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """Return the earlier layer that has passed the same tensors; None if there is none."""
        found = next((each for each, passed in self.kv.items() if passed[0] is key and passed[1] is value), None)
        if found is None and layer is not None:
            self.kv[layer] = (key, value)
        return found


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention inputs of the running step."""

    attention: AttentionInputs
    caches: Sequence[KVCache | None]
    """Keys and values of each layer; None for a layer without attention. The layers in `sources` follow all others."""
    windows: tuple[int | None, ...]
    """Sliding window of each layer."""
    sources: Mapping[int, int] = field(default_factory=dict)
    """For each layer without its own keys and values, the earlier layer whose keys and values it uses."""
    schedules: dict[tuple[int | None, int], DecodeSchedule | None] = field(default_factory=dict)
    """Schedules computed by earlier layers, by window and number of KV heads."""

    def schedule(self, window: int | None, num_kv_heads: int) -> DecodeSchedule | None:
        """Return a layer's schedule; the first layer of each kind creates it."""
        key = (window, num_kv_heads)
        if key not in self.schedules:
            self.schedules[key] = self.attention.schedule(window, num_kv_heads)
        return self.schedules[key]


_STEP: ContextVar[PagedStep] = ContextVar("quire_paged_step")
_RECORDING: ContextVar[Recording] = ContextVar("quire_probe_recording")


@contextmanager
def running(step: PagedStep) -> Iterator[None]:
    """Make `PAGED` attention use this step within the context."""
    token = _STEP.set(step)
    try:
        with unexpanded():
            yield
    finally:
        _STEP.reset(token)


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the calls of `PROBE` attention within the context."""
    recorded = Recording()
    token = _RECORDING.set(recorded)
    try:
        with unexpanded():
            yield recorded
    finally:
        _RECORDING.reset(token)


def _attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query `[n, num_heads, t, head_dim]`, key and value `[n, num_kv_heads, t, head_dim]`.

    In a layer with latent attention, the key is the latent vector `[n, 1, t, rank]` and the value the rotary key.

    n is 1 for tokens of several rows, or the number of rows with t tokens each. `s_aux` `[num_heads]` are attention
    sinks.

    Returns:
        The result `[n, t, num_heads, head_dim]`, and None instead of attention weights.
    """
    step = _STEP.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    source = step.sources.get(layer, layer)
    cache = step.caches[source]
    assert cache is not None, "the probe saw a call of this layer"
    k_cache, v_cache = cache
    new_query, new_key, new_value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    slots, tables = step.attention.places(source)
    if source == layer:
        write_kv(new_key, new_value, k_cache, v_cache, slots)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent = layer_of(module)
    if latent is not None:
        if softcap is not None or s_aux is not None:
            raise NotImplementedError("latent attention with a soft cap or sinks")
        attended = latent.attend(new_query, cache, step.attention, scale)
        return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None
    attended = paged_attention(
        new_query,
        k_cache,
        v_cache,
        tables,
        step.attention.query_start,
        step.attention.context_lens,
        max_query_len=step.attention.max_query_len,
        min_query_len=step.attention.min_query_len,
        num_leading_decodes=step.attention.num_leading_decodes,
        scale=scale,
        sliding_window=step.windows[layer],
        soft_cap=softcap,
        sinks=None if s_aux is None else s_aux.float().contiguous(),
        schedule=step.schedule(step.windows[layer], k_cache.shape[1]),
    )
    return attended.view(query.shape[0], query.shape[2], *attended.shape[1:]), None


def _record(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    window = sliding_window or (None if attention_mask is None else int(attention_mask.flatten()[0]) or None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    unknown = (name for name, given in others.items() if isinstance(given, torch.Tensor))
    latent = layer_of(module)
    layer = getattr(module, "layer_idx", None)
    recorded = _RECORDING.get()
    recorded.calls.append(
        LayerCall(
            layer=layer,
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_dim=value.shape[3],
            sliding_window=window,
            causal=bool(causal),
            unknown=tuple(name for name in unknown if name not in _HARMLESS_TENSORS),
            latent=latent is not None,
            source=recorded.source(layer, key, value),
        )
    )
    _, num_heads, num_tokens, _ = query.shape
    value_dim = value.shape[3] if latent is None else latent.value_dim
    return query.new_zeros(1, num_tokens, num_heads, value_dim), None


def _window_as_mask(*_: object, local_size: int | None = None, **__: object) -> torch.Tensor:
    return torch.full((1, 1, 1, 1), local_size or 0)


def _register(name: str, attention: Callable[..., object]) -> None:
    AttentionInterface.register(name, attention)


_register(PAGED, _attend_paged)
_register(PROBE, _record)
AttentionMaskInterface.register(PROBE, _window_as_mask)
