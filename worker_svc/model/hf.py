"""The second path: decoders of `transformers` on our pages.

A decoder qualifies when its class declares attention-backend support, that is when all it knows of earlier tokens goes
through the attention function. That is declared, not proven, so two checks at load follow: a *probe* learns what each
layer stores and refuses what pages cannot express, and a *trial* computes two short rows in chunks over a small pool
and compares the logits with the model's own attention. A model that would answer wrongly is refused, in one line.

The last hidden states are what the class's base model returns; a hook on it sees them. A class that has none still
generates, but makes no embeddings.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from shared.config import ConfigError
from shared.logging import get_logger
from worker_svc.model import llama
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.config import text_config
from worker_svc.model.hf_attention import PAGED, PROBE, LayerCall, PagedStep, recording, running

_STATELESS_LAYERS = {"full_attention", "sliding_attention"}
_TRIAL_TOKENS = 12
_TRIAL_BLOCK_SIZE = 4
_TRIAL_TOLERANCE = 0.02
"""Largest distance of two logits, in parts of the largest logit, that rounding of 16-bit types explains."""


class TransformersModel:
    """A decoder of `transformers` whose attention runs on pages."""

    def __init__(self, decoder: PreTrainedModel, calls: Sequence[LayerCall]) -> None:
        self._decoder = decoder
        ordered = sorted(calls, key=lambda call: call.layer or 0)
        self._windows = tuple(call.sliding_window for call in ordered)
        self._kv_shapes = tuple(KVShape(call.num_kv_heads, call.head_dim) for call in ordered)
        self._keeps_logits = "logits_to_keep" in inspect.signature(decoder.forward).parameters
        self._seen: torch.Tensor | None = None
        """The last hidden states of the forward pass under way, `[1, T, hidden_size]`."""
        self._hidden_size = 0
        if decoder.base_model is not decoder:
            decoder.base_model.register_forward_hook(self._see)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """See `Model.kv_shapes`."""
        return self._kv_shapes

    @property
    def capturable(self) -> bool:
        """Not known of decoders that others wrote."""
        return False

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Model.forward`."""
        return self._run(input_ids, positions, attention, caches, logits_index)[0]

    @property
    def hidden_size(self) -> int:
        """See `Model.hidden_size`; known once a step was computed, as `load` does."""
        return self._hidden_size

    def forward_hidden(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor,
        hidden_index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Model.forward_hidden`."""
        logits, hidden = self._run(input_ids, positions, attention, caches, logits_index)
        assert hidden is not None, "a model without hidden states says so by its `hidden_size`"
        return logits, hidden[0, hidden_index]

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits as `forward` gives them, and the last hidden states of all tokens `[1, T, hidden_size]`.

        The whole class runs, head included, so that what it does to its logits (soft caps, scaling) is kept.
        """
        selection = {"logits_to_keep": logits_index} if self._keeps_logits and logits_index is not None else {}
        with running(PagedStep(attention, caches, self._windows)):
            logits: torch.Tensor = self._decoder(
                input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **selection
            ).logits[0]
        hidden, self._seen = self._seen, None
        return logits if selection or logits_index is None else logits[logits_index], hidden

    def _see(self, _module: torch.nn.Module, _inputs: object, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
            self._seen, self._hidden_size = hidden, hidden.shape[-1]


def load(
    architecture: str,
    config: PretrainedConfig,
    folder: Path,
    *,
    seed: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> TransformersModel:
    """The decoder that config.json names, with its weights on `device`.

    Args:
        architecture: class name from config.json.
        config: all of config.json.
        folder: where the weights are.
        seed: draw the weights by this seed instead of reading them.
        dtype: type of weights and activations.
        device: where the model lives.

    Raises:
        ConfigError: it cannot run on pages, or the weights do not fit.
    """
    try:
        decoder = _read(folder, dtype) if seed is None else _draw(config, seed, dtype)
    except ConfigError:
        raise
    except Exception as error:  # a class's constructor and the weights' reader raise what they like
        raise ConfigError(f"model: {architecture} cannot be made from {folder}: {_first_line(error)}") from error
    decoder.to(device)  # type: ignore[arg-type]
    decoder.eval()  # type: ignore[no-untyped-call]
    decoder.requires_grad_(False)
    # Only used to warn about padding, for which `transformers` waits for the device in every step. Some configurations
    # insist on having one, hence not by assignment.
    vars(decoder.config)["pad_token_id"] = None
    try:
        with torch.inference_mode():
            model = TransformersModel(decoder, _probe(architecture, decoder, device))
            _try(architecture, decoder, model, dtype, device)
    except ConfigError:
        raise
    except Exception as error:  # whatever a class does that we did not foresee, it will not do it to a request
        raise _refusal(architecture, f"its forward pass fails: {_first_line(error)}") from error
    return model


def check_class(architecture: str, config: PretrainedConfig) -> None:
    """Refuses what is known to be unfit before anything else is looked at.

    Raises:
        ConfigError: it cannot run on pages.
    """
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)  # some configurations have several classes
    if getattr(known, "__name__", None) != architecture:
        raise _refusal(architecture, "it is no decoder that this version of transformers knows")
    if not known._supports_attention_backend:
        raise _refusal(architecture, "its class in transformers does not declare attention-backend support")
    parameters = inspect.signature(known.forward).parameters
    if "position_ids" not in parameters or getattr(config, "is_encoder_decoder", False):
        raise _refusal(architecture, "it does not take the positions of its tokens")
    text = text_config(config)
    others = set(getattr(text, "layer_types", None) or ()) - _STATELESS_LAYERS
    if others:
        raise _refusal(architecture, f"its layers keep state that is not paged KV ({', '.join(sorted(others))})")
    if getattr(text, "num_kv_shared_layers", 0):
        raise _refusal(architecture, "some of its layers share keys and values")


def _read(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader: Any = AutoModelForCausalLM
    decoder, report = loader.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation=PAGED,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if report["unexpected_keys"]:
        # Old checkpoints carry masks and the like; classes know best what they need.
        get_logger().warning("weights not used", names=sorted(map(str, report["unexpected_keys"]))[:5])
    for what in ("missing_keys", "mismatched_keys"):
        if report[what]:
            names = sorted(map(str, report[what]))
            raise ConfigError(f"model: {folder}: {what.replace('_', ' ')}: {names[0]} ({len(names)} in all)")
    return cast(PreTrainedModel, decoder)


def _draw(config: PretrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(seed)
    maker: Any = AutoModelForCausalLM
    return cast(PreTrainedModel, maker.from_config(config, dtype=dtype, attn_implementation=PAGED))


def _probe(architecture: str, decoder: PreTrainedModel, device: torch.device) -> list[LayerCall]:
    """What each layer asks of attention.

    Raises:
        ConfigError: something that pages cannot express.
    """
    decoder.set_attn_implementation(PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with recording() as recorded:
        decoder(input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    decoder.set_attn_implementation(PAGED)
    calls = recorded.calls
    num_layers = text_config(decoder.config).num_hidden_layers
    if sorted(-1 if call.layer is None else call.layer for call in calls) != list(range(num_layers)):
        raise _refusal(architecture, f"its {num_layers} layers do not call attention once each ({len(calls)} calls)")
    for call in calls:
        if call.unknown:
            raise _refusal(architecture, f"its attention takes {', '.join(call.unknown)}")
        if call.head_dim != call.value_dim or not call.causal:
            raise _refusal(architecture, "its attention is not causal or has values of another size than keys")
    return calls


def _try(
    architecture: str, decoder: PreTrainedModel, model: TransformersModel, dtype: torch.dtype, device: torch.device
) -> None:
    """Computes two rows over pages and by the model's own attention.

    Raises:
        ConfigError: the logits differ by more than rounding.
    """
    vocab_size = text_config(decoder.config).vocab_size
    tokens = torch.arange(1, 2 * _TRIAL_TOKENS + 1, device=device).remainder(vocab_size).view(2, _TRIAL_TOKENS)
    paged = _trial_logits(model, tokens, dtype, device)
    decoder.set_attn_implementation("eager")
    own = decoder(input_ids=tokens, use_cache=False).logits[:, -1]
    decoder.set_attn_implementation(PAGED)
    distance = float((paged - own).abs().max()) / max(float(own.abs().max()), 1e-6)
    if not distance <= _TRIAL_TOLERANCE:
        raise _refusal(architecture, f"over pages its logits differ from its own by {distance:.0%}")


def _trial_logits(
    model: TransformersModel, tokens: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The logits after the last token of each row `[2, vocab_size]`, the rows computed in two unequal chunks."""
    blocks_per_row = _TRIAL_TOKENS // _TRIAL_BLOCK_SIZE
    caches = [
        (torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
        for size in ((2 * blocks_per_row, s.num_kv_heads, _TRIAL_BLOCK_SIZE, s.head_dim) for s in model.kv_shapes)
    ]
    tables = torch.arange(2 * blocks_per_row, dtype=torch.int32, device=device).view(blocks_per_row, 2).T.contiguous()
    positions = torch.arange(_TRIAL_TOKENS, device=device)
    slots = tables[:, positions // _TRIAL_BLOCK_SIZE].long() * _TRIAL_BLOCK_SIZE + positions % _TRIAL_BLOCK_SIZE
    logits = torch.empty(0)
    for spans in (((0, 7), (0, 1)), ((7, _TRIAL_TOKENS), (1, _TRIAL_TOKENS))):
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
            torch.cat([positions[span] for _, span in taken]),
            attention,
            caches,
            torch.tensor([lengths[0] - 1, sum(lengths) - 1], device=device),
        )
    return logits


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _refusal(architecture: str, why: str) -> ConfigError:
    return ConfigError(
        f"model: {architecture} cannot be served: {why}; what works: {', '.join(llama.ARCHITECTURES)} and decoders of"
        " transformers with attention-backend support, such as Gemma2ForCausalLM, Phi3ForCausalLM or GPT2LMHeadModel"
    )
