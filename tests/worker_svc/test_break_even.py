"""The context at which attention costs as much as the products, compared with the contents of `transformers` models."""

from typing import Any

import pytest
import torch
import transformers

from worker_svc.model.config import break_even_context, weights_per_layer

SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    ("name", "changes", "num_growing"),
    [
        ("Llama", {"num_key_value_heads": 6}, 6),
        ("Llama", {"num_key_value_heads": 2, "head_dim": 64}, 6),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}, 6),
        ("Gemma3Text", {"num_key_value_heads": 2, "head_dim": 16}, 1),
    ],
    ids=["Llama", "Llama of wide heads", "Qwen3", "Gemma 3, whose other layers have a window"],
)
def test_break_even_is_where_the_operations_are_equal(name: str, changes: dict[str, Any], num_growing: int) -> None:
    """A token's products, counted from all layers' weights, equal its attention over that many tokens."""
    config = getattr(transformers, f"{name}Config")(**(SIZES | changes))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    layers = model.model.layers
    products = sum(2 * weight.numel() for weight in layers.parameters() if weight.dim() == 2)
    # For each head and context token: one score and one weighted value, each with two operations per element.
    attention = num_growing * config.num_attention_heads * config.head_dim * 4

    assert break_even_context(config) == products // attention


def test_layers_of_different_sizes_count_with_their_own_sizes() -> None:
    """Gemma 4 has wider heads in the layers whose attention grows with the context."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 64, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4TextConfig(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    products = sum(2 * weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)

    assert weights_per_layer(config) == products // (2 * 6)
    assert break_even_context(config) == products // (6 * 64 * 4)


def test_experts_of_gemma_4_count_in_addition_to_its_mlp() -> None:
    """Its file names the number of experts per token in another way. They count if they are enabled."""
    sizes = SIZES | {"head_dim": 16, "hidden_size_per_layer_input": 0, "num_experts": 4, "moe_intermediate_size": 24}
    dense, mixture = (
        transformers.Gemma4TextConfig(**sizes, enable_moe_block=enabled, top_k_experts=2) for enabled in (False, True)
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(mixture)  # type: ignore[no-untyped-call]
    experts = model.model.layers[0].experts
    of_one = sum(weight[0].numel() for weight in (experts.gate_up_proj, experts.down_proj))

    assert weights_per_layer(mixture) == weights_per_layer(dense) + 2 * of_one


def test_a_mixture_counts_the_experts_that_a_token_sees() -> None:
    """Two experts of four cost as much as a dense layer with twice one expert's size."""
    mixture = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    )
    dense = transformers.LlamaConfig(**(SIZES | {"intermediate_size": 400}), num_key_value_heads=2)

    assert break_even_context(mixture) == break_even_context(dense)


def test_attention_within_windows_alone_does_not_grow() -> None:
    """A model with windows in all layers has no break-even, unless the windows hold the whole context."""
    assert break_even_context(transformers.MistralConfig(**SIZES, sliding_window=64)) == 0
    wide = transformers.MistralConfig(**SIZES, sliding_window=4096, max_position_embeddings=4096)
    assert break_even_context(wide) == break_even_context(transformers.MistralConfig(**SIZES, sliding_window=None)) > 0
    assert break_even_context(transformers.PretrainedConfig()) == 0
