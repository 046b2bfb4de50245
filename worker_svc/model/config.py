"""Properties of a model, read from its config.json."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from shared.config import ConfigError
from shared.logging import adopt_libraries
from worker_svc.model.decoder_config import DecoderConfig, ModelConfig, text_config
from worker_svc.model.scheme import read_quantisation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PER_LAYER = frozenset(
    {
        *("head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    }
)
"""Sizes that may differ between layers."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(folder: Path) -> "PretrainedConfig":
    """Read the configuration in `folder` with `transformers`, whose import takes a second.

    Raises:
        ConfigError: config.json is missing, this version of transformers does not support it, or it has a field that
            the worker does not support.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} holds no config.json; use the folder of a Hugging Face checkpoint")
    from transformers import AutoConfig

    adopt_libraries()
    is_quantised = read_quantisation(folder) is not None
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Invalid JSON and failed validation raise unrelated types.
        _check_type(folder)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        what = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        raise ConfigError(
            f"model: {folder}/config.json is not valid: {what.rstrip('.')}; correct it, or use another checkpoint"
        ) from None
    if is_quantised:
        vars(config).pop("quantization_config", None)  # `weights` reads such checkpoints, but `transformers` must not.
    text = config.get_text_config(decoder=True)
    others = set(getattr(text, "per_layer_attributes", None) or ()) - _PER_LAYER
    if others:
        raise ConfigError(
            f"model: config.json has a different {min(others)} in each layer (per_layer_config), which is not"
            " supported; use another model"
        )
    if getattr(config, "transformers_weights", None) is not None:
        raise ConfigError(
            "model: config.json names a weights file (transformers_weights), which is not supported; remove the field"
            " and rename the file to model.safetensors"
        )
    return config


def _check_type(folder: Path) -> None:
    """Check that `transformers` knows the `model_type` of a config.json that it cannot read.

    Raises:
        ConfigError: it does not.
    """
    from transformers import CONFIG_MAPPING, __version__

    try:
        model_type = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"model: transformers {__version__} has no model_type {model_type!r}; use a type that docs/models.md lists"
        )


def architecture(config: ModelConfig) -> str:
    """Return the class name in config.json.

    Raises:
        ConfigError: there is none.
    """
    names = config.architectures
    if not isinstance(names, list) or not names:
        raise ConfigError('model: config.json has no class in "architectures"; add a list with one class name')
    return str(names[0])


def decoder_config(config: "PretrainedConfig") -> "PretrainedConfig":
    """Return `text_config`. In a multimodal model, the whole configuration determines whether embeddings are tied."""
    text: PretrainedConfig = config.get_text_config(decoder=True)
    if text is not config:
        # Classes without a decoder, and a few others, lack this field.
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", getattr(text, "tie_word_embeddings", False))
    return text


def position_limit(config: ModelConfig, wanted: int) -> int:
    """Return the maximum sequence length: `wanted`, or config.json's value if `wanted` is 0.

    Raises:
        ConfigError: `wanted` exceeds the length in config.json, or both are missing. Some models without positions in
            their weights, such as Bloom, have no length in config.json.
    """
    text = text_config(config)
    limit = next(
        (size for size in map(partial(_size, text), ("max_position_embeddings", "max_seq_len")) if size > 0), 0
    )
    if limit and wanted > limit:
        raise ConfigError(f"max_model_len: {wanted} exceeds the model's {limit} positions; lower it")
    if not limit and not wanted:
        raise ConfigError(
            "model: config.json has no max_position_embeddings; use a decoder-only model, and set max_model_len if its"
            " class has no limit"
        )
    return wanted or limit


def fix_long_rope(config: ModelConfig, num_positions: int) -> int:
    """Change `config` so that one set of longrope factors applies to all lengths.

    The factors are `long_factor`, and PhiMoE's `long_mscale`. `transformers` uses the long factors for all rows of a
    batch if its longest row exceeds the original length. A request's tokens would then depend on other requests, and
    cached keys on their row's length. Therefore, as in vLLM, the long factors are used for every row if the longest
    permitted row exceeds the original length.

    Args:
        config: all of config.json.
        num_positions: length of the longest allowed sequence in tokens.

    Returns:
        The original length in tokens if the long factors are used; 0 if not, or if there is no longrope scaling.
    """
    if isinstance(config, DecoderConfig):
        return 0  # `llama` does not support longrope.
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return 0
    original: int = rope.get("original_max_position_embeddings", text.max_position_embeddings)
    if num_positions <= original:
        return 0
    text.rope_parameters = rope | {
        f"short_{name.removeprefix('long_')}": value for name, value in rope.items() if name.startswith("long_")
    }
    return original


def break_even_context(config: ModelConfig) -> int:
    """Return the context length at which a token's attention needs as many operations as its matrix products.

    The scheduler uses this estimate only to make steps equally long. It assumes gated MLPs, and that the cost of layers
    other than full attention does not grow with the context.

    Returns:
        The length in tokens; 0 if attention does not grow with the context, or config.json lacks the sizes.
    """
    layers = _layers(text_config(config))
    heads = sum(_heads_size(layer) for index, layer in enumerate(layers) if _attends_fully(layer, index)) / len(layers)
    weights = weights_per_layer(config)
    if not weights or not heads:
        return 0
    # Two operations per weight. Per head element and context token four more: two for the score, two for the value.
    return max(1, int(2 * weights / (4 * heads)))


def weights_per_layer(config: ModelConfig) -> int:
    """Return the number of weights in one layer's matrix products for a token, with a gated MLP.

    In a mixture of experts, only one token's experts count. The result is 0 if config.json lacks the sizes. If layers
    have different sizes, it is their mean.
    """
    layers = _layers(text_config(config))
    return sum(map(_weights, layers)) // len(layers)


def _weights(layer: ModelConfig) -> int:
    hidden, heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
    if not hidden or not heads:
        return 0
    kv_size = _heads_size(layer) // heads * (_size(layer, "num_key_value_heads") or heads)
    inner = _size(layer, "intermediate_size") or 4 * hidden
    if experts := _size(layer, "num_experts_per_tok"):
        inner = experts * (_size(layer, "moe_intermediate_size") or inner)
        inner += _size(layer, "shared_expert_intermediate_size")
    elif getattr(layer, "enable_moe_block", False):  # Gemma 4 has experts in addition to a dense MLP.
        inner += _size(layer, "top_k_experts") * _size(layer, "moe_intermediate_size")
    return 2 * hidden * (_heads_size(layer) + kv_size) + 3 * hidden * inner


def _layers(text: ModelConfig) -> Sequence[ModelConfig]:
    """Return the configuration of each layer; the whole one once if it has no number of layers."""
    if getattr(text, "is_heterogeneous", False):
        return list(cast("PretrainedConfig", text).per_layer_config)
    return [text] * (_size(text, "num_hidden_layers") or 1)


def _heads_size(layer: ModelConfig) -> int:
    """Return the total number of elements in a token's query heads."""
    hidden, heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
    return heads * (_size(layer, "head_dim") or hidden // heads) if heads else 0


def _attends_fully(layer: ModelConfig, index: int) -> bool:
    kinds = getattr(layer, "layer_types", None)
    if kinds:
        return index < len(kinds) and bool(kinds[index] == "full_attention")
    window = _size(layer, "sliding_window")
    return not 0 < window < _size(layer, "max_position_embeddings")


def _size(text: ModelConfig, name: str) -> int:
    """Return an integer of the configuration; 0 if it is missing or differs per layer."""
    if name in (getattr(text, "per_layer_attributes", None) or ()):
        return 0
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0


def choose_dtype(config: ModelConfig, wanted: str, device: torch.device) -> torch.dtype:
    """Return the dtype for weights, activations and KV: the setting, or else config.json's, or else float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    given: Any = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
    dtype = DTYPES.get(given, torch.float32) if isinstance(given, str) else given or torch.float32
    if dtype not in DTYPES.values():
        return torch.float32
    if device.type == "cpu" and dtype == torch.float16:
        return torch.float32  # float16 is slow on CPUs, and bfloat16 has a shorter mantissa.
    return dtype


def eos_token_ids(folder: Path, config: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end a sequence, from config.json and generation_config.json, ascending.

    Token IDs outside the model's vocabulary, such as -1, are ignored.
    """
    found: set[int] = set()
    generation = folder / "generation_config.json"
    sources: list[Any] = [
        getattr(config, "eos_token_id", None),
        getattr(text_config(config), "eos_token_id", None),
    ]
    if generation.is_file():
        try:
            sources.append(json.loads(generation.read_text()).get("eos_token_id"))
        except (ValueError, AttributeError):
            raise ConfigError(f"model: {generation} is not a JSON object; correct or remove the file") from None
    for source in sources:
        found.update(token for token in (source if isinstance(source, list) else [source]) if isinstance(token, int))
    vocab_size = text_config(config).vocab_size
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))
