"""Decoders of `transformers` with the paged KV cache.

A decoder is supported if its class declares attention-backend support: then earlier tokens affect a token only through
the attention function. Two checks at load verify the declaration. A *probe* records what each layer stores, and rejects
layers that a paged KV cache cannot represent. A *trial* (`hf_trial`) computes two short rows and compares the logits
with those of the model's own attention. A model that would return wrong results is rejected with a one-line message.

A forward hook on the class's base model records the last hidden states. A class without a base model generates tokens
but no embeddings.
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
from worker_svc.model import families, hf_packed, hf_trial
from worker_svc.model.base import AttentionInputs, KVCache, KVShape
from worker_svc.model.config import decoder_config
from worker_svc.model.decoder_config import text_config
from worker_svc.model.hf_attention import PAGED, PROBE, LayerCall, PagedStep, recording, running
from worker_svc.model.quantised import log_form
from worker_svc.model.scheme import read_quantisation
from worker_svc.model.weights import check_unquantised, read_tensors

_TEXT_OF = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")
"""Classes for several media; the class of `transformers` for their text part serves it."""
_STATELESS_LAYERS = {"full_attention", "sliding_attention"}


class TransformersModel:
    """A decoder of `transformers` with paged attention."""

    def __init__(self, decoder: PreTrainedModel, calls: Sequence[LayerCall]) -> None:
        self._decoder = decoder
        ordered = sorted(calls, key=lambda call: call.layer or 0)
        self._windows = tuple(call.sliding_window for call in ordered)
        self._kv_shapes = tuple(KVShape(call.num_kv_heads, call.head_dim) for call in ordered)
        self._keeps_logits = "logits_to_keep" in inspect.signature(decoder.forward).parameters
        self._hidden: torch.Tensor | None = None
        """Last hidden states of the running forward pass, `[1, T, hidden_size]`."""
        self._hidden_size = 0
        if decoder.base_model is not decoder:
            decoder.base_model.register_forward_hook(self._keep_hidden)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        return self._kv_shapes

    @property
    def capturable(self) -> bool:
        """Return False, because only a trial shows whether a decoder of `transformers` supports capture."""
        return False

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> torch.Tensor:
        return self._run(input_ids, positions, attention, caches, logits_index)[0]

    @property
    def hidden_size(self) -> int:
        """See `Model.hidden_size`; known after the first step, which `load` computes."""
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
        logits, hidden = self._run(input_ids, positions, attention, caches, logits_index)
        assert hidden is not None, "a model without hidden states must have `hidden_size` 0"
        return logits, hidden[0, hidden_index]

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionInputs,
        caches: Sequence[KVCache],
        logits_index: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits of `forward`, and the last hidden states of all tokens `[1, T, hidden_size]`.

        The whole class runs, with its head, so that its soft caps or scaling of logits apply.
        """
        selection = {"logits_to_keep": logits_index} if self._keeps_logits and logits_index is not None else {}
        with running(PagedStep(attention, caches, self._windows)):
            logits: torch.Tensor = self._decoder(
                input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **selection
            ).logits[0]
        hidden, self._hidden = self._hidden, None
        return logits if selection or logits_index is None else logits[logits_index], hidden

    def _keep_hidden(self, _module: torch.nn.Module, _inputs: object, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        if isinstance(hidden, torch.Tensor) and hidden.dim() == 3:
            self._hidden, self._hidden_size = hidden, hidden.shape[-1]


def load(
    architecture: str,
    config: PretrainedConfig,
    folder: Path,
    *,
    seed: int | None,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    quantization: str = "none",
) -> TransformersModel:
    """Load the decoder that config.json names, with its weights on `device`.

    Args:
        architecture: class name from config.json.
        config: all of config.json.
        folder: the checkpoint.
        seed: draw random weights with this seed instead of reading them; None: read them.
        dtype: type of weights and activations.
        device: the device of the model.
        num_positions: length of the longest sequence in tokens.
        quantization: quantization of the weights: "none", "int8" or "int4".

    Raises:
        ConfigError: `quantization` is not available here, the decoder does not support a paged KV cache, or the weights
            do not match config.json.
    """
    kernels = None if quantization == "none" else hf_packed.choose_kernels(device, dtype, quantization)
    try:
        decoder = _read(folder, config, dtype) if seed is None else _draw(config, seed, dtype)
    except ConfigError:
        raise
    except Exception as error:  # constructors and weight readers raise errors of many types
        raise ConfigError(f"model: {architecture} cannot be loaded from {folder}: {_first_line(error)}") from error
    decoder.to(device)  # type: ignore[arg-type]
    decoder.eval()  # type: ignore[no-untyped-call]
    decoder.requires_grad_(False)
    # `transformers` uses the pad token only to warn about padding, and synchronises with the device for it in every
    # step. Some configurations reject the assignment of None, hence `vars`.
    vars(decoder.config)["pad_token_id"] = None
    try:
        with torch.inference_mode():
            model = TransformersModel(decoder, _probe(architecture, decoder, device))
            distance = hf_trial.distance(decoder, model, device, num_positions)
    except ConfigError:
        raise
    except Exception as error:  # a class that fails now would fail for a request
        raise _refusal(architecture, f"its forward pass fails: {_first_line(error)}") from error
    if not distance <= hf_trial.TOLERANCE:
        raise _refusal(architecture, f"its logits with a paged KV cache differ from its own logits by {distance:.1%}")
    if kernels is not None:
        hf_packed.pack(decoder, quantization, kernels)
        _try_packed(architecture, decoder, model, quantization, num_positions)
    return model


def _try_packed(
    architecture: str, decoder: PreTrainedModel, model: TransformersModel, quantization: str, num_positions: int
) -> None:
    """Compute the rows of the trial with packed weights.

    Raises:
        ConfigError: the forward pass fails, for example because a class reads the weight of a layer itself.
    """
    try:
        with torch.inference_mode():
            finite = hf_trial.has_finite_logits(decoder, model, torch.device("cpu"), num_positions)
    except Exception as error:  # a class that fails now would fail for a request
        why = f"its forward pass fails: {_first_line(error)}"
    else:
        if finite:
            return
        why = "its logits are not finite"
    raise ConfigError(f"quantization: {quantization} is not supported for {architecture}: {why}; use none")


def check_class(architecture: str, config: PretrainedConfig) -> None:
    """Check that a class is supported, as far as config.json shows.

    Raises:
        ConfigError: the class does not support a paged KV cache.
    """
    text = config.get_text_config(decoder=True)
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)  # some configurations have several classes
    name = getattr(known, "__name__", None)
    if name is None:
        raise _refusal(architecture, "this version of transformers has no decoder of this name")
    if name != architecture and (text is config or architecture not in _TEXT_OF):
        raise _refusal(architecture, f"the decoder of model_type {config.model_type} is {name}")
    if not known._supports_attention_backend:
        raise _refusal(architecture, "its class in transformers does not declare attention-backend support")
    parameters = inspect.signature(known.forward).parameters
    if "position_ids" not in parameters or getattr(config, "is_encoder_decoder", False):
        raise _refusal(architecture, "its forward pass does not accept position_ids")
    others = set(getattr(text, "layer_types", None) or ()) - _STATELESS_LAYERS
    if others:
        raise _refusal(architecture, f"its layers keep state that is not paged KV ({', '.join(sorted(others))})")
    if getattr(text, "num_kv_shared_layers", 0):
        raise _refusal(architecture, "some of its layers share keys and values")


def _read(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader: Any = AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "config": config}
    quantised = read_quantisation(folder) is not None
    if not quantised:
        check_unquantised(folder)
    if quantised or text_config(config) is not config:
        config = decoder_config(config)
        loader = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the automatic class needs a folder
        source = {
            "pretrained_model_name_or_path": None,
            "config": config,
            "state_dict": _tensors(folder, dtype),
        }
    decoder, report = loader.from_pretrained(
        **source,
        dtype=dtype,
        attn_implementation=PAGED,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if report["unexpected_keys"]:
        # Old checkpoints contain masks and other buffers, which current classes do not need.
        get_logger().warning(
            "weights: unexpected tensors ignored", names=sorted(map(str, report["unexpected_keys"]))[:5]
        )
    for what in ("missing_keys", "mismatched_keys"):
        if report[what]:
            names = sorted(map(str, report[what]))
            raise ConfigError(
                f"model: {folder}: {what.replace('_', ' ')}: {names[0]} ({len(names)} in total);"
                " use a checkpoint that matches config.json"
            )
    return cast(PreTrainedModel, decoder)


def _tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's text part, with quantised weights in `dtype`."""
    tensors: dict[str, torch.Tensor] = {}
    num_dequantised = 0
    for name, tensor in read_tensors(folder):
        if isinstance(tensor, torch.Tensor):
            tensors[name] = tensor
        else:
            tensors[name] = tensor.dequantised().to(dtype)
            num_dequantised += 1
    log_form(num_packed=0, num_dequantised=num_dequantised, dtype=dtype)
    return tensors


def _draw(config: PretrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(seed)
    maker: Any = AutoModelForCausalLM
    return cast(PreTrainedModel, maker.from_config(decoder_config(config), dtype=dtype, attn_implementation=PAGED))


def _probe(architecture: str, decoder: PreTrainedModel, device: torch.device) -> list[LayerCall]:
    """Return the attention call of each layer.

    Raises:
        ConfigError: a paged KV cache cannot represent a layer.
    """
    decoder.set_attn_implementation(PROBE)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with recording() as recorded:
        decoder(input_ids=tokens, position_ids=torch.arange(2, device=device)[None], use_cache=False)
    decoder.set_attn_implementation(PAGED)
    calls = recorded.calls
    num_layers = text_config(decoder.config).num_hidden_layers
    if sorted(-1 if call.layer is None else call.layer for call in calls) != list(range(num_layers)):
        raise _refusal(
            architecture, f"its {num_layers} layers do not each call attention exactly once ({len(calls)} calls)"
        )
    for call in calls:
        if call.unknown:
            raise _refusal(architecture, f"its attention uses unsupported arguments: {', '.join(call.unknown)}")
        if call.head_dim != call.value_dim or not call.causal:
            raise _refusal(architecture, "its attention is not causal, or its keys and values differ in size")
    return calls


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _refusal(architecture: str, why: str) -> ConfigError:
    return ConfigError(
        f"model: {architecture} is not supported: {why}; use {', '.join(families.ARCHITECTURES)} or a decoder of"
        " transformers with attention-backend support, such as Gemma2ForCausalLM or Phi3ForCausalLM;"
        " docs/models.md lists them"
    )
