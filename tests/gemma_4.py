"""Tiny models with the proportions of Gemma 4 from the hub: layers with and without a window differ in KV size."""

from typing import Any

_SLIDES = ["sliding_attention"]
_FULL = ["full_attention"]
_DENSE: dict[str, Any] = {"enable_moe_block": False}
_LARGER_WINDOWS: dict[str, Any] = {"num_key_value_heads": 4, "num_kv_shared_layers": 0}

GEMMA_4: dict[str, dict[str, Any]] = {
    # Layers without a window are twice as large. The last two layers use the KV of earlier ones.
    "E2B": _DENSE
    | {"num_hidden_layers": 7, "layer_types": _SLIDES * 4 + _FULL + _SLIDES + _FULL}
    | {"num_key_value_heads": 1, "attention_k_eq_v": False, "num_global_key_value_heads": None},
    # Layers with a window are twice as large, and the values of the others are keys without rotation.
    "26B-A4B": _LARGER_WINDOWS | {"num_hidden_layers": 4, "layer_types": _SLIDES * 3 + _FULL},
    "31B": _LARGER_WINDOWS | _DENSE | {"num_hidden_layers": 6, "layer_types": (_SLIDES * 2 + _FULL) * 2},
}
"""Fields of the configuration for `make_checkpoint("Gemma4ForCausalLM", …)`, by the model with such proportions."""
