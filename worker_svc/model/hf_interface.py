"""Decoders of `transformers` that call paged attention through the attention interface.

A class may be served in this way if it declares attention-backend support. Then earlier tokens affect a token only
through the attention function. A probe records what each layer passes to that function, and rejects layers that paged
attention does not compute. A layer may pass the keys and values of an earlier layer, which are then stored once.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from worker_svc.model.base import AttentionInputs, KVCache
from worker_svc.model.decoder_config import text_config
from worker_svc.model.hf_attention import PAGED, PROBE, LayerCall, PagedStep, recording, running
from worker_svc.model.hf_model import TransformersModel, UnsuitableError


class InterfaceModel(TransformersModel):
    """A decoder of `transformers` with paged attention."""

    attention = PAGED

    def __init__(self, decoder: PreTrainedModel, calls: Sequence[LayerCall]) -> None:
        super().__init__(decoder, [call.kv_shape for call in calls if call.source is None])
        self._windows = tuple(call.sliding_window for call in calls)
        self._sources = {layer: call.source for layer, call in enumerate(calls) if call.source is not None}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._windows[: len(self._kv_shapes)]

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        selection = {"logits_to_keep": logits_index} if self._keeps_logits and logits_index is not None else {}
        with running(PagedStep(attention, caches, self._windows, self._sources)):
            logits: torch.Tensor = self._decoder(
                input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **selection
            ).logits[0]
        hidden = self._take_hidden()
        logits = logits if selection or logits_index is None else logits[logits_index]
        return logits, None if hidden is None else hidden[0]


def probe(decoder: PreTrainedModel, device: torch.device) -> list[LayerCall]:
    """Return the attention call of each layer, in the order of the layers.

    Raises:
        UnsuitableError: paged attention does not compute a layer.
    """
    calls = sorted(_calls(decoder, device), key=lambda call: -1 if call.layer is None else call.layer)
    num_layers = text_config(decoder.config).num_hidden_layers
    if [call.layer for call in calls] != list(range(num_layers)):
        raise UnsuitableError(f"its {num_layers} layers do not each call attention exactly once ({len(calls)} calls)")
    with_kv = [call.source is None for call in calls]
    if with_kv != sorted(with_kv, reverse=True):
        raise UnsuitableError("layers with keys and values of their own follow layers without them")
    if any(call.sliding_window != calls[call.source].sliding_window for call in calls if call.source is not None):
        raise UnsuitableError("a layer uses the keys and values of a layer with another window")
    return calls


def probe_some(decoder: PreTrainedModel, device: torch.device) -> dict[int, LayerCall]:
    """Return the attention calls of the layers with attention, by layer.

    Raises:
        UnsuitableError: paged attention does not compute a layer.
    """
    calls = _calls(decoder, device)
    by_layer = {call.layer: call for call in calls if call.layer is not None}
    if len(by_layer) < len(calls):
        raise UnsuitableError("its layers do not each call attention at most once")
    if any(call.source is not None for call in calls):
        raise UnsuitableError("a layer uses the keys and values of another layer")
    return by_layer


def _calls(decoder: PreTrainedModel, device: torch.device) -> list[LayerCall]:
    """Return all attention calls, in order.

    Raises:
        UnsuitableError: paged attention does not compute one.
    """
    decoder.set_attn_implementation(PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with recording() as recorded:
        decoder(input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    for call in recorded.calls:
        if call.unknown:
            raise UnsuitableError(f"its attention uses unsupported arguments: {', '.join(call.unknown)}")
        if (call.head_dim != call.value_dim and not call.latent) or not call.causal:
            raise UnsuitableError("its attention is not causal, or its keys and values differ in size")
        if call.latent and call.sliding_window is not None:
            raise UnsuitableError("its latent attention has a sliding window")
    return recorded.calls
