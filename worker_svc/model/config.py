"""What config.json says of a model, in the terms the worker needs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from shared.config import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration in `folder`.

    Raises:
        ConfigError: no config.json, not one that this version of transformers knows, or a quantised checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} holds no config.json; give the folder of a Hugging Face checkpoint")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # unknown model types, bad JSON and failed validation have no common type
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(f"model: {folder}/config.json cannot be used: {detail[0]}") from None
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model: {folder} is a quantised checkpoint; give one with plain weights")
    return config


def architecture(config: PretrainedConfig) -> str:
    """The class name that config.json gives.

    Raises:
        ConfigError: it gives none.
    """
    names = config.architectures or []
    if not names:
        raise ConfigError('model: config.json names no class in "architectures"')
    return str(names[0])


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part that describes the decoder; the whole, unless the model has other modalities."""
    return config.get_text_config(decoder=True)


def position_limit(config: PretrainedConfig) -> int:
    """The longest sequence whose positions the model computes the same way in every batch.

    Raises:
        ConfigError: config.json gives no limit.
    """
    text = text_config(config)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        raise ConfigError("model: config.json gives no max_position_embeddings; is this a decoder?")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond the original length `transformers` switches the frequencies of *all* tokens of a batch by the longest
        # of them, so that a request's tokens would depend on its neighbours.
        limit = min(limit, rope.get("original_max_position_embeddings", limit))
    return limit


def break_even_context(config: PretrainedConfig) -> int:
    """The context at which a token's attention takes as many operations as its products with the weights; 0 where
    attention does not grow with the context, or config.json does not tell.

    An estimate: MLPs are taken for gated ones, and layers of other kinds than full attention for ones whose attention
    does not grow. The scheduler makes steps equally long by it, and nothing else.
    """
    text = text_config(config)
    share = _full_attention_share(text)
    hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
    if not hidden or not heads or not share:
        return 0
    head_dim = _size(text, "head_dim") or hidden // heads
    kv_heads = _size(text, "num_key_value_heads") or heads
    inner = _size(text, "intermediate_size") or 4 * hidden
    if experts := _size(text, "num_experts_per_tok"):
        inner = experts * (_size(text, "moe_intermediate_size") or inner)
        inner += _size(text, "shared_expert_intermediate_size")
    weights = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * inner
    # Two operations per weight; four per element of a head and token of the context: a score's and a value's.
    return max(1, int(2 * weights / (4 * heads * head_dim * share)))


def _full_attention_share(text: PretrainedConfig) -> float:
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return float(sum(kind == "full_attention" for kind in kinds) / len(kinds))
    window = _size(text, "sliding_window")
    return 0.0 if 0 < window < _size(text, "max_position_embeddings") else 1.0


def _size(text: PretrainedConfig, name: str) -> int:
    """A number of config.json; 0 where it gives none, or one per layer."""
    value = getattr(text, name, None)
    return value if isinstance(value, int) else 0


def choose_dtype(config: PretrainedConfig, wanted: str, device: torch.device) -> torch.dtype:
    """The type of weights, activations and KV: what is wanted, else what config.json says, else float32."""
    if wanted != "auto":
        return DTYPES[wanted]
    given: Any = getattr(text_config(config), "dtype", None) or getattr(config, "dtype", None)
    dtype = DTYPES.get(given, torch.float32) if isinstance(given, str) else given or torch.float32
    if dtype not in DTYPES.values():
        return torch.float32
    if device.type == "cpu" and dtype == torch.float16:
        return torch.float32  # CPUs compute float16 slowly and bfloat16 would lose bits that the weights have
    return dtype


def eos_token_ids(folder: Path, config: PretrainedConfig) -> tuple[int, ...]:
    """Every token that ends a sequence, by config.json or generation_config.json, ascending; those files also name
    tokens that the model does not have (-1, or one that only the tokenizer knows), which it never chooses."""
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
            raise ConfigError(f"model: {generation} is not a JSON object") from None
    for source in sources:
        found.update(token for token in (source if isinstance(source, list) else [source]) if isinstance(token, int))
    vocab_size = text_config(config).vocab_size
    return tuple(sorted(token for token in found if 0 <= token < vocab_size))
