"""Configuration for a decoder in `llama`: the fields of config.json that its families read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ModelConfig: TypeAlias = "DecoderConfig | PretrainedConfig"
"""Content of config.json, read by `config_reader` for the families in `llama`, otherwise by `transformers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Fields of config.json with the names, meanings and defaults of `transformers`.

    A field that the family's class does not have is None, 0, False or empty, unless config.json contains it.
    """

    model_type: str
    architectures: list[str] | None = None
    dtype: torch.dtype | None = None
    hidden_act: str = ""
    is_causal: bool = True
    tie_word_embeddings: bool = False

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rms_norm_eps: float
    initializer_range: float

    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False

    max_position_embeddings: int
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    sliding_window: int | None = None
    layer_types: list[str] | None = None

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    mlp_only_layers: list[int] = field(default_factory=list)
    decoder_sparse_step: int = 1
    norm_topk_prob: bool = False
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0

    eos_token_id: int | list[int] | None = None

    @classmethod
    def of(cls, config: "PretrainedConfig") -> Self:
        """Return the fields of a configuration that `transformers` has read."""
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls) if hasattr(config, each.name)})


def text_config(config: ModelConfig) -> ModelConfig:
    """Return the part of the configuration that describes the decoder, which is all of it for a text-only model."""
    return config if isinstance(config, DecoderConfig) else config.get_text_config(decoder=True)
