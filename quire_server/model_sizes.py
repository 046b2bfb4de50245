"""Model sizes: what config.json, or parameters given by hand, say about a model's layers, KV and weights. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire_server.gguf_header import GgufTensor
from shared.config import ConfigError

_FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
"""Values of `model_type` whose weights `capacity.weights_bytes` counts."""
_FIELDS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "sliding_window", "tie_word_embeddings"),
)
_CLASS_DEFAULTS = {
    "llama": (32, 32, None, None, 4096, 11008, 32000, 2048, None, False),
    "mistral": (32, 32, 8, None, 4096, 14336, 32000, 131072, 4096, False),
    "ministral": (32, 32, 8, None, 4096, 14336, 32000, 131072, 4096, False),
    "mixtral": (32, 32, 8, None, 4096, 14336, 32000, 131072, None, False),
    "qwen2": (32, 32, 32, None, 4096, 22016, 151936, 32768, 4096, False),
    "qwen3": (32, 32, 32, 128, 4096, 22016, 151936, 32768, 4096, False),
    "gpt_oss": (36, 64, 8, 64, 2880, 2880, 201088, 131072, 128, False),
    "gemma2": (26, 8, 4, 256, 2304, 9216, 256000, 8192, 4096, True),
    "gemma3_text": (26, 8, 4, 256, 2304, 9216, 262208, 131072, 4096, True),
    "vaultgemma": (26, 8, 4, 256, 2304, 9216, 256000, 8192, 4096, True),
    "cohere2": (40, 64, None, 128, 8192, 22528, 256000, 8192, 4096, True),
    "olmo3": (32, 32, None, None, 4096, 11008, 50304, 2048, 4096, False),
    "exaone4": (32, 32, 32, None, 4096, 16384, 102400, 2048, 4096, False),
    "starcoder2": (30, 24, 2, None, 3072, 12288, 49152, 4096, None, True),
    "phi3": (32, 32, None, None, 3072, 8192, 32064, 4096, None, False),
}
"""Values of `_FIELDS` that a class in `transformers` uses if config.json lacks them, by `model_type`.

Files of multimodal models lack most of them.
"""
_DENSE = {"gemma2": (4, 0), "gemma3_text": (4, 2), "phi3": (2, 0)}
"""Values of `model_type` whose weights are counted from config.json as for dense decoders without biases.

The numbers are the norms of a layer: of hidden states, and of a head's queries and keys.
"""
_ALIASES = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "hidden_size": ("n_embd",),
    "max_position_embeddings": ("n_positions",),
    "intermediate_size": ("n_inner",),
}
"""Names of the same sizes in older model configurations."""
_FREES_WINDOWS = {
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), 6),
    **dict.fromkeys(("gpt_oss", "vaultgemma"), 2),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), 4),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), 0),
    **dict.fromkeys(("mistral", "ministral", "mixtral", "starcoder2", "phi3", "qwen2", "qwen3"), 0),
}
"""Values of `model_type` for which a CPU worker frees the KV behind windows. Without `layer_types` in config.json, one
layer in so many has no window, or none if the number is 0.
"""
_WIDE_FULL_LAYERS = ("gemma4_text", "gemma4_unified_text")
"""Values of `model_type` whose layers without a window have other sizes."""
_OPTIONAL_WINDOWS = ("qwen2", "qwen3")
"""Those with windows only if `use_sliding_window` is set, by default from layer `max_window_layers` on."""
_STATE_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"})
_STATE_FIELDS = frozenset(
    {
        *("mamba_d_state", "ssm_state_size", "state_size", "linear_num_value_heads", "linear_num_heads"),
        *("conv_L_cache", "layers_block_type", "hybrid_override_pattern", "short_conv_kernel_size"),
        *("linear_attn_config", "layer_group_size"),
    }
)
"""Names in config.json of models with recurrent state."""
INT4_GROUP = 64
"""Number of inputs per scale in the CPU kernels' int4 weights (`kernels.linear`)."""
_FP4_BITS = {16: 4.5, 32: 4.25}
"""Bits per weight in e2m1 with a scale of 8 bits, by inputs per scale."""
_PARTS_OF_QUANTISED = frozenset(
    {
        *("weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("weight_global_scale", "weight_scale_2", "input_global_scale"),
        *("scales", "qzeros", "g_idx", "input_scale", "input_zero_point", "k_scale", "v_scale"),
    }
)
"""Name suffixes of the additional tensors (such as scales) that a quantised layer stores next to its codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a decoder; unknown sizes are 0."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    """Elements of a key; with latent attention, elements of a latent vector."""
    rotary_dim: int = 0
    """Elements of a rotary key, which latent attention stores instead of a value; 0 for other models."""
    kv_sizes: tuple[tuple[int, int], ...] = ()
    """KV heads and elements of a key for each layer, if they differ; empty if all layers have the sizes above."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, None without one, if a CPU worker can free the KV behind windows."""
    num_absorbed: int = 0
    """Elements of the projections that the CPU kernels copy for latent attention."""
    num_heads: int = 0
    """Query heads. They affect weights, not KV."""
    hidden_size: int = 0
    intermediate_size: int = 0
    """Inner size of the MLP or of one expert."""
    vocab_size: int = 0
    max_positions: int = 0
    num_experts: int = 1
    shared_intermediate_size: int = 0
    """Inner size of the expert that computes every token."""
    tied: bool = False
    """Whether the embedding is also the LM head."""
    dtype: str = "bfloat16"
    num_parameters: int = 0
    """Number of weights if known; 0 to compute the number from the sizes above."""
    state_bytes: int = 0
    """Bytes of a row's recurrent state."""
    stored: str = "none"
    """Weight type (int8 or int4) of a quantised checkpoint that a CPU uses without conversion; "none" for all others.
    """
    stored_on_gpu: float = 0.0
    """Bits per weight, with scales, of the layers of a quantised checkpoint on a GPU; 0 if they are dequantised."""
    only_experts_stored: bool = False
    """Whether only the experts of the checkpoint are quantised (gpt-oss)."""
    biases: bool = False
    """Whether attention and experts have biases, and heads have sinks (gpt-oss)."""
    gguf: tuple[GgufTensor, ...] = ()
    """Tensors of a GGUF file, which a CPU does not convert; empty for other checkpoints."""


def sizes_from_config(config: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes in config.json.

    Raises:
        ConfigError: a size is missing, layers have a state, or latent attention stores an index too.
    """
    text = _with_defaults(config.get("text_config") or config)
    if text.get("kv_lora_rank") and text.get("index_head_dim"):
        raise ConfigError(
            "model: its layers store an index (index_head_dim), which is not counted; use --params with the bytes that"
            " a worker logs"
        )
    if not _STATE_FIELDS.isdisjoint(text) or not _STATE_LAYERS.isdisjoint(text.get("layer_types") or ()):
        raise ConfigError(
            "model: its layers have recurrent state, whose size is not in config.json; pass the sizes with --params:"
            " layers, kv_heads and head_dim of its attention, parameters, and state, the state_bytes in a worker's log"
        )

    def size(name: str, default: int | None = None) -> int:
        for each in (name, *_ALIASES.get(name, ())):
            if isinstance(text.get(each), int):
                if text[each] < (1 if default is None else 0):
                    raise ConfigError(f"model: config.json: {each}: {text[each]} is too small; use a valid config.json")
                return int(text[each])
        if default is None:
            raise ConfigError(f"model: config.json has no {name}; pass the sizes with --params")
        return default

    heads, hidden = size("num_attention_heads"), size("hidden_size")
    experts = size("num_local_experts", size("num_experts", 1))
    inner = size("intermediate_size", 4 * hidden)
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    rank = int(text.get("kv_lora_rank") or 0)
    layers = size("num_hidden_layers")
    if text.get("model_type") == "longcat_flash":
        layers = 2 * size("num_layers")  # Each layer has two attention layers.
    layers -= size("num_kv_shared_layers", 0)  # The last layers use the keys and values of earlier layers.
    of_head = size("qk_nope_head_dim") + size("v_head_dim") if rank else 0
    kv_heads, head_dim = size("num_key_value_heads", heads), size("head_dim", hidden // heads)
    sizes = ModelSizes(
        num_layers=layers,
        num_kv_heads=1 if rank else kv_heads,
        head_dim=rank or head_dim,
        rotary_dim=size("qk_rope_head_dim") if rank else 0,
        kv_sizes=_kv_sizes(text, layers, kv_heads, head_dim),
        windows=_windows(text, layers),
        num_absorbed=layers * heads * of_head * rank,
        num_heads=heads,
        hidden_size=hidden,
        intermediate_size=size("moe_intermediate_size", inner) if experts > 1 else inner,
        vocab_size=size("vocab_size"),
        max_positions=size("max_position_embeddings", 0),
        num_experts=experts,
        shared_intermediate_size=size("shared_expert_intermediate_size", 0),
        tied=bool(text.get("tie_word_embeddings", False)),
        dtype=dtype if dtype in ("float32", "bfloat16", "float16") else "float32",
        stored=_stored(config) if counts_weights_of(config) else "none",
        stored_on_gpu=_bits_on_gpu(config) if counts_weights_of(config) else 0.0,
        only_experts_stored=_method(config) == "mxfp4",
        biases=text.get("model_type") == "gpt_oss",
    )
    return replace(sizes, num_parameters=_count_dense(text, sizes))


def _with_defaults(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values that its class uses for missing fields."""
    defaults = dict(zip(_FIELDS, _CLASS_DEFAULTS.get(text.get("model_type", ""), ()), strict=False))
    for name, others in _ALIASES.items():
        if any(other in text for other in others):
            defaults.pop(name, None)
    return defaults | dict(text)


def _count_dense(text: Mapping[str, Any], sizes: ModelSizes) -> int:
    """Return the number of weights of a decoder in `_DENSE`; 0 for others."""
    if text.get("model_type") not in _DENSE:
        return 0
    norms, head_norms = _DENSE[text["model_type"]]
    hidden, inner, head_dim = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
    attention = 2 * (sizes.num_heads + sizes.num_kv_heads) * head_dim * hidden
    layer = attention + 3 * inner * hidden + norms * hidden + head_norms * head_dim
    return sizes.num_layers * layer + (1 if sizes.tied else 2) * sizes.vocab_size * hidden + hidden


def _kv_sizes(
    text: Mapping[str, Any], num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[tuple[int, int], ...]:
    """Return the KV heads and the elements of a key for each layer, or nothing if layers do not differ in them.

    Gemma 4 has other sizes in layers without a window, which its config.json contains in one of two forms.
    """
    differing = {int(layer): sizes for layer, sizes in (text.get("per_layer_config") or {}).items()}
    if not differing and text.get("model_type") in _WIDE_FULL_LAYERS:
        wide = {"head_dim": text.get("global_head_dim", 512)}
        if text.get("attention_k_eq_v") and text.get("num_global_key_value_heads"):
            wide["num_key_value_heads"] = text["num_global_key_value_heads"]
        total = int(text["num_hidden_layers"])
        is_full = _default_full_layers(total, 6, last=True)
        if types := text.get("layer_types"):
            is_full = [kind == "full_attention" for kind in types]
        differing = {layer: wide for layer, full in enumerate(is_full) if full}
    found = tuple(
        (int(sizes.get("num_key_value_heads", num_kv_heads)), int(sizes.get("head_dim", head_dim)))
        for sizes in (differing.get(layer, {}) for layer in range(num_layers))
    )
    return found if set(found) != {(num_kv_heads, head_dim)} else ()


def _windows(text: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer; empty if a worker does not free the KV behind windows."""
    model_type, window = text.get("model_type"), text.get("sliding_window")
    if model_type not in _FREES_WINDOWS or not isinstance(window, int):
        return ()
    pattern = text.get("sliding_window_pattern") or _FREES_WINDOWS[model_type]
    every = len(pattern) if isinstance(pattern, str) else int(pattern)  # EXAONE 4 has "LLLG" instead of 4.
    types = text.get("layer_types")
    if model_type in _OPTIONAL_WINDOWS and not text.get("use_sliding_window"):
        return ()
    if types is not None:
        is_full = [each != "sliding_attention" for each in types[:num_layers]]
    elif model_type in _OPTIONAL_WINDOWS:
        is_full = [layer < int(text.get("max_window_layers", 28)) for layer in range(num_layers)]
    else:
        total = int(text.get("num_hidden_layers", num_layers))
        is_full = _default_full_layers(total, every, last=model_type in _WIDE_FULL_LAYERS)[:num_layers]
    return tuple(None if full else window for full in is_full)


def _default_full_layers(num_layers: int, every: int, *, last: bool) -> list[bool]:
    """Return whether each layer has no window: one in `every` layers or none if it is 0, and perhaps the last one."""
    return [
        (every > 0 and layer % every == every - 1) or (last and layer == num_layers - 1) for layer in range(num_layers)
    ]


def _stored(config: Mapping[str, Any]) -> str:
    """Return the weight type if the CPU kernels use the checkpoint without conversion; "none" if they dequantise it."""
    raw = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(raw, Mapping):
        return "none"
    match str(raw.get("quant_method", "")).lower().replace("_", "-"):
        case "gptq" if not raw.get("desc_act"):
            return _as_held(raw.get("bits"), raw.get("group_size", 128), symmetric=bool(raw.get("sym", True)))
        case "awq":
            return _as_held(4, raw.get("group_size", raw.get("q_group_size", 128)))
        case "compressed-tensors":
            groups = (raw.get("config_groups") or {}).values()
            weights = [group["weights"] for group in groups if group.get("weights")]
            found = {_as_held_compressed(each) for each in weights}
            return found.pop() if len(found) == 1 else "none"
        case _:
            return "none"


def _method(config: Mapping[str, Any]) -> str:
    """Return the quantisation method of a checkpoint; "" if its weights are not quantised."""
    raw = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return str(raw.get("quant_method", "")).lower().replace("_", "-") if isinstance(raw, Mapping) else ""


def _bits_on_gpu(config: Mapping[str, Any]) -> float:
    """Return the bits per weight that a GPU holds of a quantised checkpoint (`worker_svc.model.weight_only`)."""
    raw = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if not isinstance(raw, Mapping):
        return 0.0
    match _method(config):
        case "gptq" if not raw.get("desc_act"):
            return _grouped_bits(raw.get("bits"), raw.get("group_size", 128), symmetric=bool(raw.get("sym", True)))
        case "awq":
            return _grouped_bits(4, raw.get("group_size", raw.get("q_group_size", 128)), symmetric=False)
        case "fp8" | "fbgemm-fp8":
            block = raw.get("weight_block_size")
            # Scales take 32 bits per group without products over e4m3, and nearly none with them.
            return _grouped_bits(8, block[1] if block else 0, symmetric=True)
        case "mxfp4":
            return _FP4_BITS[32]
        case "modelopt" | "modelopt-fp4":
            return _FP4_BITS[16] if raw.get("quant_algo") == "NVFP4" else 8.0
        case "compressed-tensors":
            groups = (raw.get("config_groups") or {}).values()
            weights = [group["weights"] for group in groups if group.get("weights")]
            found = {
                _FP4_BITS.get(each.get("group_size"), 0.0)
                if (each.get("num_bits"), each.get("type")) == (4, "float")
                else _grouped_bits(each.get("num_bits"), each.get("group_size"), symmetric=each.get("symmetric", True))
                for each in weights
            }
            return found.pop() if len(found) == 1 else 0.0
        case _:
            return 0.0


def _grouped_bits(bits: object, group_size: object, *, symmetric: bool) -> float:
    """Return the bits per weight with a scale of 16 bits and perhaps a zero point of 8 bits per group of inputs."""
    if not isinstance(bits, int):
        return 0.0
    if not isinstance(group_size, int) or group_size <= 0:
        return float(bits)
    return bits + (16 if symmetric else 24) / group_size


def _as_held_compressed(weights: Mapping[str, Any]) -> str:
    """Return the type in which the CPU kernels hold one config group of a compressed-tensors checkpoint."""
    if weights.get("type", "int") != "int" or weights.get("actorder") in ("group", "dynamic"):
        return "none"
    size, symmetric = weights.get("group_size") or 0, bool(weights.get("symmetric", True))
    # Signed codes with one scale per output are stored in int8, even if the codes have 4 bits.
    bits = 8 if symmetric and size <= 0 else weights.get("num_bits")
    return _as_held(bits, size, symmetric=symmetric)


def _as_held(bits: object, group_size: object, *, symmetric: bool = True) -> str:
    """Return the type in which the CPU kernels hold codes with this many bits and this group size."""
    grouped = isinstance(group_size, int) and group_size > 0
    if bits == 4 and (not grouped or int(str(group_size)) % INT4_GROUP == 0):
        return "int4"
    return "int8" if bits == 8 and symmetric and not grouped else "none"


def elements_of(config: Mapping[str, Any], name: str, shape: Sequence[int]) -> int:
    """Return how many weights a checkpoint tensor represents; 0 for scales and other parts of quantised tensors."""
    part = name.rpartition(".")[2]
    if part in _PARTS_OF_QUANTISED:
        return 0
    size = math.prod(shape)
    if part not in ("weight_packed", "qweight"):
        return size
    raw = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    groups = (raw.get("config_groups") or {}).values()
    in_groups = next((group["weights"].get("num_bits") for group in groups if group.get("weights")), 4)
    return size * 32 // int(raw.get("bits") or raw.get("w_bit") or in_groups)


def counts_weights_of(config: Mapping[str, Any]) -> bool:
    """Return whether `weights_bytes` can count the weights of this model from its sizes."""
    return (config.get("text_config") or config).get("model_type") in _FAMILIES


def sizes_from_params(text: str) -> ModelSizes:
    """Parse sizes from a text such as "layers=32,kv_heads=8,head_dim=128,parameters=8e9".

    Raises:
        ConfigError: a name is unknown, a value is not a number, or one of the three KV sizes is missing.
    """
    values: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _PARAMS:
            raise ConfigError(f"--params: unknown size {name!r}; use {', '.join(_PARAMS)}")
        try:
            values[_PARAMS[name]] = int(float(value))
        except (ValueError, OverflowError):
            raise ConfigError(f"--params: {name}: {value!r} is not a number; write {name}=NUMBER") from None
        if values[_PARAMS[name]] < 1:
            raise ConfigError(f"--params: {name}: {value} is too small; use at least 1")
    heads, hidden = values.get("num_heads", 0), values.get("hidden_size", 0)
    if heads and hidden:
        values.setdefault("head_dim", hidden // heads)
    values.setdefault("num_kv_heads", heads)
    for name, field in _PARAMS.items():
        if field in ("num_layers", "num_kv_heads", "head_dim") and not values.get(field):
            raise ConfigError(f"--params: {name} is missing; add {name}=NUMBER")
    return ModelSizes(**values)  # type: ignore[arg-type]


_PARAMS = {
    "layers": "num_layers",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "heads": "num_heads",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "vocab": "vocab_size",
    "positions": "max_positions",
    "experts": "num_experts",
    "parameters": "num_parameters",
    "state": "state_bytes",
}
"""Field of `ModelSizes` for each name in `--params`."""
