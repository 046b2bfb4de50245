"""Model families that `llama` implements: properties that their `transformers` classes define, not config.json.

`FAMILIES` lists the fields of config.json that each class reads. Fields that the class ignores, such as
`sliding_window` in a Llama, are ignored here too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from worker_svc.model.config import decoder_config
from worker_svc.model.decoder_config import DecoderConfig, ModelConfig
from worker_svc.model.rope import can_tabulate


class Window(Enum):
    """Layers with attention over only `sliding_window` tokens."""

    NO_LAYER = "none"
    EVERY_LAYER = "every"
    BY_LAYER_TYPE = "by layer_types"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts of a family."""

    block: str = "mlp"
    """Name of a layer's mixture; its experts are `{block}.experts.{number}`."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    intermediate_size: str = "moe_intermediate_size"
    """Field with the size of an expert."""
    renormalise: bool | None = None
    """Whether the weights of a token's experts are divided by their sum; None to follow the field `norm_topk_prob`."""
    some_layers: bool = True
    """Whether `mlp_only_layers` and `decoder_sparse_step` select the layers; False: all layers."""
    shared: bool = False
    """Whether an additional expert computes all tokens."""
    router: str = "gate"
    merged: bool = False
    """Whether the checkpoint has all experts of a layer in one tensor `[experts, inputs, outputs]` with a bias, and
    gate and up alternate (gpt-oss)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Properties of a model family that its `transformers` class defines, not config.json."""

    architectures: tuple[str, ...] = ()
    """Class names in config.json."""
    text_of: tuple[str, ...] = ()
    """Names of multimodal classes whose text part belongs to the family."""
    qkv_bias: bool | str = False
    """Whether query, key and value projections have biases, or the field that says so."""
    output_bias: bool | str = False
    """Whether the output projection of attention has a bias, or the field that says so."""
    mlp_bias: bool | str = False
    """Whether the projections of the MLP have biases, or the field that says so."""
    qk_norm: bool = False
    window: Window
    experts: Experts | None = None
    sinks: bool = False
    """Whether each head has an attention sink."""
    needs_triton: bool = False
    """Whether `llama` implements the family only with Triton kernels; `hf` serves it elsewhere."""


FAMILIES = {
    "llama": Family(
        architectures=("LlamaForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        window=Window.NO_LAYER,
    ),
    "mistral": Family(
        architectures=("MistralForCausalLM",),
        text_of=("Mistral3ForConditionalGeneration",),
        window=Window.EVERY_LAYER,
    ),
    # `transformers` treats a Mistral with `layer_types` as a Ministral.
    "ministral": Family(architectures=("MinistralForCausalLM", "MistralForCausalLM"), window=Window.BY_LAYER_TYPE),
    "mixtral": Family(
        architectures=("MixtralForCausalLM",),
        window=Window.EVERY_LAYER,
        experts=Experts(
            block="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            intermediate_size="intermediate_size",
            renormalise=True,
            some_layers=False,
        ),
    ),
    "qwen2": Family(architectures=("Qwen2ForCausalLM",), qkv_bias=True, window=Window.BY_LAYER_TYPE),
    "qwen2_moe": Family(
        architectures=("Qwen2MoeForCausalLM",),
        qkv_bias="qkv_bias",
        window=Window.BY_LAYER_TYPE,
        experts=Experts(shared=True),
    ),
    "qwen3": Family(
        architectures=("Qwen3ForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window=Window.BY_LAYER_TYPE,
    ),
    "qwen3_moe": Family(
        architectures=("Qwen3MoeForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window=Window.EVERY_LAYER,
        experts=Experts(),
    ),
    "gpt_oss": Family(
        architectures=("GptOssForCausalLM",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        window=Window.BY_LAYER_TYPE,
        experts=Experts(
            router="router",
            intermediate_size="intermediate_size",
            renormalise=True,
            some_layers=False,
            merged=True,
        ),
        sinks=True,
        needs_triton=True,
    ),
    # For text, the positions are equal in all dimensions, so multimodal rotary embeddings equal ordinary ones.
    "qwen2_vl_text": Family(text_of=("Qwen2VLForConditionalGeneration",), qkv_bias=True, window=Window.BY_LAYER_TYPE),
    "qwen2_5_vl_text": Family(
        text_of=("Qwen2_5_VLForConditionalGeneration",), qkv_bias=True, window=Window.BY_LAYER_TYPE
    ),
    "qwen3_vl_text": Family(
        text_of=("Qwen3VLForConditionalGeneration",),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window=Window.NO_LAYER,
    ),
}
"""Families by the `model_type` in config.json or in its text part."""
ARCHITECTURES = tuple(
    dict.fromkeys(name for family in FAMILIES.values() if not family.needs_triton for name in family.architectures)
)
"""Class names of the families that `llama` implements on every device."""


def own_config(architecture: str, whole: ModelConfig) -> DecoderConfig | None:
    """Return the decoder's configuration (all of config.json or its text part) if `llama` implements it.

    None if `llama` does not support the configuration; `hf` may support the model.
    """
    if isinstance(whole, DecoderConfig):
        config = whole
    else:
        decoder = whole if whole.model_type in FAMILIES else decoder_config(whole)
        if decoder.model_type not in FAMILIES or getattr(decoder, "is_heterogeneous", False):
            return None
        config = DecoderConfig.of(decoder)
    family = FAMILIES[config.model_type]
    implemented = (
        architecture in (family.architectures if whole.model_type in FAMILIES else family.text_of)
        and config.hidden_act == "silu"
        and config.is_causal
        and config.num_key_value_heads > 0
        and config.num_attention_heads % config.num_key_value_heads == 0
        and can_tabulate(config, head_dim(config))
        and _has_usable_windows(family, config)
        and (family.experts is None or 0 < config.num_experts_per_tok <= config.num_experts)
    )
    return config if implemented else None


def head_dim(config: DecoderConfig) -> int:
    """Return the number of elements of a head."""
    return config.head_dim or config.hidden_size // config.num_attention_heads


def has_bias(given: bool | str, config: DecoderConfig) -> bool:
    """Return the value of a field such as `Family.qkv_bias` for a configuration."""
    return bool(getattr(config, given)) if isinstance(given, str) else given


def windows(config: DecoderConfig) -> list[int | None]:
    """Return for each layer the number of tokens that it attends over; None for all."""
    family = FAMILIES[config.model_type]
    return [config.sliding_window if slides else None for slides in _sliding_layers(family, config)]


def mixture_layers(config: DecoderConfig) -> list[bool]:
    """Return for each layer whether it has a mixture of experts instead of an MLP."""
    experts = FAMILIES[config.model_type].experts
    layers = range(int(config.num_hidden_layers))
    if experts is None or not experts.some_layers:
        return [experts is not None for _ in layers]
    return [
        layer not in config.mlp_only_layers and config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        for layer in layers
    ]


def mlps(layer: str, config: DecoderConfig, *, mixed: bool) -> Iterator[tuple[str, Experts, int]]:
    """Yield the name of each MLP or expert in a layer, its projections' names, and its inner size."""
    experts = FAMILIES[config.model_type].experts
    if experts is None or not mixed:
        yield f"{layer}.mlp", Experts(), config.intermediate_size
        return
    for number in range(config.num_experts):
        yield f"{layer}.{experts.block}.experts.{number}", experts, getattr(config, experts.intermediate_size)
    if experts.shared:
        yield f"{layer}.{experts.block}.shared_expert", Experts(), config.shared_expert_intermediate_size


def _sliding_layers(family: Family, config: DecoderConfig) -> list[bool]:
    """Return for each layer whether it attends over `sliding_window` tokens only."""
    if family.window is Window.BY_LAYER_TYPE:
        return [kind == "sliding_attention" for kind in config.layer_types or []]
    every = family.window is Window.EVERY_LAYER and config.sliding_window is not None
    return [every] * int(config.num_hidden_layers)


def _has_usable_windows(family: Family, config: DecoderConfig) -> bool:
    """Return whether all layer types are known, and a window size is given if a layer needs one."""
    if family.window is Window.BY_LAYER_TYPE and not set(config.layer_types or []) <= {
        "full_attention",
        "sliding_attention",
    }:
        return False
    return not any(_sliding_layers(family, config)) or (config.sliding_window or 0) > 0
