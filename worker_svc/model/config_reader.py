"""Reads config.json for the families in `llama` without importing `transformers`, which takes a second.

`transformers` defines the meaning of config.json. This module therefore accepts only unambiguous files: a text-only
model of a known family, whose fields are all known and have ordinary values. It declines all other files, including
invalid ones; `transformers` then reads the file and reports errors. A test compares the two readers.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from worker_svc.model.decoder_config import DecoderConfig
from worker_svc.model.families import own_config
from worker_svc.model.rope import ROPE_TYPES
from worker_svc.model.scheme import read_quantisation

_Json = dict[str, Any]

_COMMON: _Json = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
}
_LLAMA: _Json = _COMMON | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
_MISTRAL: _Json = _LLAMA | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN: _Json = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN_MOE: _Json = _QWEN | {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
}
_DEFAULTS: dict[str, _Json] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "mixtral": _MISTRAL
    | {"rms_norm_eps": 1e-5, "sliding_window": None, "num_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN_MOE
    | {
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    "qwen3": _QWEN | {"head_dim": 128},
    "qwen3_moe": _QWEN_MOE
    | {
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
"""Values of fields that config.json lacks, by `model_type`."""
_LOCAL_EXPERTS = ("mixtral", "qwen3_moe")
"""Families in which `num_local_experts` is an alias of `num_experts`."""
_NO_KV_HEADS = ("llama", "qwen2", "qwen3")
"""Families in which `num_key_value_heads` may be null."""


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_float(value: object) -> bool:
    return type(value) is float


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and bool(value > 0)


def _is_list(of: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(of, value))


def _or_none(of: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or of(value)


_DTYPES = ("float32", "bfloat16", "float16")
_KINDS = ("full_attention", "sliding_attention")
_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"), _is_size),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"), _is_size),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), _is_size),
    **dict.fromkeys(("shared_expert_intermediate_size", "decoder_sparse_step"), _is_size),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "norm_topk_prob", "tie_word_embeddings"), _is_bool),
    "rms_norm_eps": _is_float,
    "initializer_range": lambda value: isinstance(value, float) and 0 <= value <= 1,
    "model_type": _is_text,
    "hidden_act": _is_text,
    "architectures": _is_list(_is_text),
    "dtype": lambda value: value in _DTYPES,
    "torch_dtype": lambda value: value in _DTYPES,
    "eos_token_id": lambda value: value is None or _is_int(value) or _is_list(_is_int)(value),
    "sliding_window": _or_none(_is_count),
    "use_sliding_window": _is_bool,
    "max_window_layers": _is_int,
    "layer_types": _or_none(_is_list(lambda kind: kind in _KINDS)),
    "mlp_only_layers": _is_list(_is_int),
    "rope_theta": _is_number,
    "rope_scaling": lambda value: value is None or isinstance(value, dict),
    "rope_parameters": lambda value: value is None or isinstance(value, dict),
    "quantization_config": lambda value: isinstance(value, dict),
    # These fields do not affect the worker's results.
    **dict.fromkeys(("bos_token_id", "pad_token_id", "pretraining_tp"), _or_none(_is_int)),
    **dict.fromkeys(("use_cache", "output_router_logits", "use_mrope", "unsloth_fixed"), _is_bool),
    **dict.fromkeys(("transformers_version", "_name_or_path", "unsloth_version"), _is_text),
    **dict.fromkeys(("router_aux_loss_coef", "router_jitter_noise"), _is_float),
    "attention_dropout": _is_number,
}
"""Required value of each known field."""

_ROPE_FIELDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), _is_positive),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _or_none(_is_positive)),
    **dict.fromkeys(("rope_type", "type"), lambda value: value in ROPE_TYPES),
    "original_max_position_embeddings": _is_size,
    "partial_rotary_factor": _is_positive,
    "truncate": _is_bool,
    "mrope_section": _is_list(_is_int),
}
_ROPE_NEEDS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "yarn": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
}


def read_own(folder: Path) -> DecoderConfig | None:
    """Return the configuration in `folder` if `llama` implements the model; otherwise None.

    Raises:
        ConfigError: the weights are quantised by a method that is not supported.
    """
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(raw, dict) or not raw.get("architectures"):
        return None
    if "quantization_config" in raw and read_quantisation(folder) is None:
        return None
    config = decoder_config_of(raw)
    return None if config is None else own_config(raw["architectures"][0], config)


def decoder_config_of(raw: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the configuration in a config.json; None if it is ambiguous."""
    family = raw.get("model_type")
    if family == "mistral" and "layer_types" in raw:
        family = "ministral"  # as in `transformers`
    if not isinstance(family, str) or family not in _DEFAULTS:
        return None
    given = dict(raw)
    if family in _LOCAL_EXPERTS and "num_local_experts" in given and "num_experts" not in given:
        given["num_experts"] = given.pop("num_local_experts")
    fields = _DEFAULTS[family] | given | {"model_type": family}
    if fields.get("num_key_value_heads", 0) is None and family in _NO_KV_HEADS:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields.get("head_dim", 0) is None and family != "qwen3":
        del fields["head_dim"]
    if not all(name in _FIELDS and _FIELDS[name](value) for name, value in fields.items()):
        return None
    rope = _rope_parameters(fields)
    if rope is None or not _is_consistent(fields):
        return None
    fields |= {"rope_parameters": rope, "dtype": _dtype(fields)}
    _derive(family, fields)
    known = DecoderConfig.__dataclass_fields__
    return DecoderConfig(**{name: value for name, value in fields.items() if name in known})


def _dtype(fields: Mapping[str, Any]) -> torch.dtype | None:
    name = fields.get("dtype", fields.get("torch_dtype"))
    return None if name is None else getattr(torch, name)


def _rope_parameters(fields: Mapping[str, Any]) -> _Json | None:
    """Return the rotary parameters in the format of `transformers` 5; None if they are ambiguous."""
    old, new = fields.get("rope_scaling"), fields.get("rope_parameters")
    if old and new:
        return None
    given: _Json = dict(old or new or {})
    if not all(name in _ROPE_FIELDS and _ROPE_FIELDS[name](value) for name, value in given.items()):
        return None
    rope = {"rope_theta": fields.get("rope_theta", 10000.0), "rope_type": given.get("type", "default")} | given
    if rope["rope_type"] in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
    return rope if given.keys() >= _ROPE_NEEDS[rope["rope_type"]] else None


def _is_consistent(fields: Mapping[str, Any]) -> bool:
    """Return whether sizes and layers match, as `transformers` requires."""
    layer_types = fields.get("layer_types")
    return fields["hidden_size"] % fields["num_attention_heads"] == 0 and (
        layer_types is None or len(layer_types) == fields["num_hidden_layers"]
    )


def _derive(family: str, fields: _Json) -> None:
    """Set the fields that the class of the family derives from other fields."""
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    if family in ("llama", "mistral"):
        fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if family.startswith("qwen") and not fields["use_sliding_window"]:
        fields["sliding_window"] = 0 if family == "qwen2_moe" else None
    if family in ("ministral", "qwen2", "qwen2_moe", "qwen3") and fields.get("layer_types") is None:
        slides = (_slides(family, fields, layer) for layer in range(fields["num_hidden_layers"]))
        fields["layer_types"] = ["sliding_attention" if each else "full_attention" for each in slides]


def _slides(family: str, fields: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer has a window if `layer_types` is missing."""
    if family == "qwen2_moe":
        return fields["use_sliding_window"] and layer % 2 == 0 and layer < fields["max_window_layers"]
    first = 0 if family == "ministral" else fields["max_window_layers"]
    return fields["sliding_window"] is not None and layer >= first
