"""Decoders of `transformers` over the paged KV cache.

There are two ways. `hf_interface` replaces the attention of a class that declares attention-backend support. `hf_cache`
replaces the `Cache` of any other class, which may have keys and values, recurrent state or both. Both are checked at
load. A *probe* records what each layer stores, and rejects layers that store anything else. A *trial* (`hf_trial`)
computes two short rows and compares the logits with those of the class's own forward pass without a cache. A model that
would return wrong results is rejected with a one-line message.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kernels.native.serving import native
from kernels.native.structures import FORMATS
from shared.config import ConfigError
from shared.logging import get_logger
from worker_svc.model import families, hf_cache, hf_interface, hf_latent, hf_norms, hf_packed, hf_recurrent, hf_trial
from worker_svc.model.config import decoder_config
from worker_svc.model.decoder_config import text_config
from worker_svc.model.hf_attention import PAGED
from worker_svc.model.hf_model import TransformersModel, UnsuitableError
from worker_svc.model.quantised import log_form
from worker_svc.model.scheme import read_quantisation
from worker_svc.model.weights import check_unquantised, read_tensors

_TEXT_OF = (
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
"""Multimodal classes, each served by the `transformers` class for its text part."""
_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *hf_cache.STATE_LAYERS,
    *hf_cache.INDEXED_LAYERS,
    *("dummy", "mlp", "moe"),
}
"""Kinds of layers whose past is keys and values, recurrent state, an index or nothing."""
_OWN_CACHE = ("minimax",)
"""Model types whose class refuses every cache but its own, in its forward pass."""


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
        seed: seed for random weights; None to read the weights.
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
    except Exception as error:  # Constructors and weight readers raise many types of errors.
        raise ConfigError(f"model: {architecture} cannot be loaded from {folder}: {_first_line(error)}") from error
    decoder.to(device)  # type: ignore[arg-type]
    decoder.eval()  # type: ignore[no-untyped-call]
    decoder.requires_grad_(False)
    # `transformers` uses the pad token only for a warning about padding, which synchronises with the device in every
    # step. Use `vars`, because some configurations reject the assignment of None.
    vars(decoder.config)["pad_token_id"] = None
    hf_latent.prepare(decoder)
    serving = native() if device.type == "cpu" else None
    computes_natively = serving is not None and dtype in FORMATS
    with hf_recurrent.without_torch_warnings(decoder) if computes_natively else nullcontext():
        model = _choose(architecture, decoder, device, num_positions)
    if isinstance(model, hf_cache.CacheModel) and _has_windows(decoder.config):
        get_logger().info(
            f"KV behind sliding windows is kept: {architecture} runs through the cache interface; see with quire"
            " capacity how many requests fit. A request holds the KV of all its tokens in all layers"
        )
    if model.attention == PAGED:
        hf_latent.pack(decoder)
    else:
        hf_latent.restore(decoder)
    if kernels is not None:
        hf_packed.quantise_layers(decoder, quantization, kernels)
        hf_latent.quantise(decoder)
        _try_packed(architecture, decoder, model, quantization, num_positions)
    elif dtype == torch.bfloat16 and serving is not None:
        with torch.inference_mode():
            hf_packed.pack_unquantised(
                *(decoder, serving), lambda: hf_trial.has_finite_logits(decoder, model, device, num_positions)
            )
    if serving is not None:
        with torch.inference_mode():
            hf_norms.use_native_norms(decoder, dtype, serving)
    return model


def _choose(architecture: str, decoder: PreTrainedModel, device: torch.device, num_positions: int) -> TransformersModel:
    """Return the first model over this decoder that passes the trial.

    Raises:
        ConfigError: no way passes; the message contains the last way's reason.
    """
    reasons: list[str] = []
    with torch.inference_mode():
        for make in _ways(decoder, device):
            try:
                model = make()
            except UnsuitableError as error:
                reasons.append(str(error))
                continue
            except Exception as error:  # A class that fails in this trial would also fail for a request.
                reasons.append(f"its forward pass fails ({_first_line(error)})")
                continue
            try:
                distance = hf_trial.distance(decoder, model, device, num_positions)
            except Exception as error:
                reasons.append(f"its forward pass fails ({_first_line(error)})")
            else:
                if distance <= hf_trial.TOLERANCE:
                    if model.attention == hf_cache.CacheModel.attention:
                        get_logger().info("model served with its own attention, which is slower", reason=reasons[:1])
                    return model
                reasons.append(f"its logits with a paged KV cache differ from its own logits by {distance:.1%}")
            model.discard()
    raise _refusal(architecture, reasons[-1])


def _has_windows(config: PretrainedConfig) -> bool:
    """Return whether some layers attend to the newest tokens only, as far as config.json shows."""
    types = getattr(config, "layer_types", None)
    if types is None:
        return isinstance(getattr(config, "sliding_window", None), int)
    return any(kind in ("sliding_attention", "chunked_attention", "hybrid_sliding") for kind in types)


def _ways(decoder: PreTrainedModel, device: torch.device) -> Iterator[Callable[[], TransformersModel]]:
    """Yield functions that make a model over a decoder, the fastest first.

    For a class that takes positions, rows computed together must get the same tokens as rows computed alone. Otherwise
    rows would depend on their neighbours through shared blocks. A class that counts positions may need its rows alone.
    """
    if _calls_interface(type(decoder), decoder.config):
        yield lambda: hf_interface.InterfaceModel(decoder, hf_interface.probe(decoder, device))
    if hf_cache.keeps_state(decoder.config):
        yield from _ways_with_state(decoder, device)
        return
    takes_positions = "position_ids" in inspect.signature(decoder.forward).parameters
    for together in (True,) if takes_positions else (True, False):
        decoder.set_attn_implementation(hf_cache.CacheModel.attention)
        yield lambda together=together: hf_cache.CacheModel(  # type: ignore[misc]
            decoder, hf_cache.probe(decoder, device), together=together
        )


def _ways_with_state(decoder: PreTrainedModel, device: torch.device) -> Iterator[Callable[[], TransformersModel]]:
    """Yield functions that make a model over a decoder with recurrent state, the fastest first."""
    kinds = [
        (paged, in_place, together)
        for paged in (True, False)
        for in_place, together in ((True, True), (False, True), (False, False))
    ]
    for paged, in_place, together in kinds:
        for by_token in (False, True):

            def make(
                paged: bool = paged, in_place: bool = in_place, together: bool = together, by_token: bool = by_token
            ) -> TransformersModel:
                decoder.set_attn_implementation(hf_cache.CacheModel.attention)
                layers = hf_cache.probe(decoder, device)
                windows = hf_cache.probe_windows(decoder, layers, device) if paged else None
                return hf_cache.CacheModel(
                    *(decoder, layers), together=together, by_token=by_token, in_place=in_place, windows=windows
                )

            yield make


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
    except Exception as error:  # A class that fails in this trial would also fail for a request.
        why = f"its forward pass fails ({_first_line(error)})"
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
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)  # Some configurations belong to several classes.
    name = getattr(known, "__name__", None)
    if name is None:
        raise _refusal(architecture, "this version of transformers has no decoder of this name")
    if name != architecture and (text is config or architecture not in _TEXT_OF):
        raise _refusal(architecture, f"the decoder of model_type {config.model_type} is {name}")
    if text.model_type in _OWN_CACHE:
        raise _refusal(architecture, "its class in transformers needs a cache of its own")
    others = set(getattr(text, "layer_types", None) or ()) - _LAYERS
    if others:
        raise _refusal(architecture, f"its layers have a past of an unknown kind ({', '.join(sorted(others))})")
    if getattr(text, "attention_type", None) == "block_sparse" and not text.is_encoder_decoder:
        raise _refusal(architecture, "its attention skips blocks of longer contexts")
    parameters = inspect.signature(known.forward).parameters
    if not _calls_interface(known, text) and not {"past_key_values", "cache_params"} & parameters.keys():
        what = "keeps recurrent state outside of a cache" if known._is_stateful else "has no KV cache"
        raise _refusal(architecture, f"its class in transformers {what}")


def _calls_interface(known: type[PreTrainedModel], text: PretrainedConfig) -> bool:
    """Return whether a class may be served by `hf_interface`, as far as the class and its configuration show."""
    return (
        known._supports_attention_backend
        and "position_ids" in inspect.signature(known.forward).parameters
        and "chunked_attention" not in (getattr(text, "layer_types", None) or ())
        and not known._is_stateful
        and hf_cache.INDEXED_LAYERS.isdisjoint(getattr(text, "layer_types", None) or ())
        and not hf_cache.keeps_state(text)
    )


def _read(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader: Any = AutoModelForCausalLM
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder, "config": config}
    quantised = read_quantisation(folder) is not None
    if not quantised:
        check_unquantised(folder)
    if quantised or text_config(config) is not config:
        config = decoder_config(config)
        loader = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # The automatic class would need a folder.
        source = {
            "pretrained_model_name_or_path": None,
            "config": config,
            "state_dict": _tensors(folder, dtype),
        }
    decoder, report = loader.from_pretrained(
        **source,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    if report["unexpected_keys"]:
        # Old checkpoints contain buffers, such as masks, that current classes do not need.
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
    return cast(PreTrainedModel, maker.from_config(decoder_config(config), dtype=dtype))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _refusal(architecture: str, why: str) -> ConfigError:
    return ConfigError(
        f"model: {architecture} is not supported: {why}; use {', '.join(families.ARCHITECTURES)} or a decoder of"
        " transformers whose cache has keys and values or recurrent state, such as Gemma2ForCausalLM or"
        " Lfm2ForCausalLM; docs/models.md lists them"
    )
