"""The trial at load accepts what rounding alone moves, in bfloat16 too, and refuses every mistake over pages."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kernels.paged_attention import paged_attention
from shared.config import ConfigError
from tests.worker_svc.driver import CPU
from worker_svc.model import hf, hf_attention

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = SIZES | {"head_dim": 32, "query_pre_attn_scalar": 20, "sliding_window": 4}
FAMILIES: dict[str, tuple[Callable[..., transformers.PretrainedConfig], dict[str, Any]]] = {
    "MixtralForCausalLM": (transformers.MixtralConfig, SIZES | {"sliding_window": 4}),
    "Olmo2ForCausalLM": (transformers.Olmo2Config, SIZES),
    "Gemma3ForCausalLM": (transformers.Gemma3TextConfig, GEMMA),
    "Gemma2ForCausalLM": (transformers.Gemma2Config, GEMMA | {"attn_logit_softcapping": 5.0}),
}
SEEDS = range(4)

Arguments = dict[str, Any]


def load(architecture: str, *, num_layers: int, seed: int) -> None:
    """Loads a model of bfloat16 weights, drawn by the seed; raises ConfigError if it is refused."""
    config_class, sizes = FAMILIES[architecture]
    config = config_class(**sizes, num_hidden_layers=num_layers)
    hf.load(architecture, config, Path("none"), seed=seed, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_correct_model_passes_whatever_its_weights_are(architecture: str) -> None:
    """Rounding to bfloat16, which many layers and routers of experts amplify, has none refused."""
    refused = []
    for seed in SEEDS:
        try:
            load(architecture, num_layers=24, seed=seed)
        except ConfigError as error:
            refused.append(str(error))

    assert not refused


FAULTS: dict[str, Callable[..., Arguments]] = {
    "no scale": lambda **_: {"scale": 1.0},
    "a scale that is not the model's": lambda query, **_: {"scale": query.shape[-1] ** -0.5},
    "no soft cap": lambda **_: {"soft_cap": None},
    "no window": lambda **_: {"sliding_window": None},
    "a window too wide by one": lambda sliding_window, **_: {"sliding_window": sliding_window and sliding_window + 1},
    "earlier steps out of sight": lambda query_start, **_: {"context_lens": query_start.diff()},
    "another row's blocks": lambda block_tables, **_: {"block_tables": block_tables.flip(0)},
    "another head's queries": lambda query, **_: {"query": query.roll(1, 1)},
    "values for keys": lambda v_cache, **_: {"k_cache": v_cache},
}
"""What each fault changes of the arguments of attention, from what they are."""
HARMLESS = {
    ("MixtralForCausalLM", "a scale that is not the model's"),  # it is the model's
    ("MixtralForCausalLM", "no soft cap"),  # it has none; and so on
    ("Olmo2ForCausalLM", "a scale that is not the model's"),
    ("Olmo2ForCausalLM", "no soft cap"),
    ("Olmo2ForCausalLM", "no window"),
    ("Olmo2ForCausalLM", "a window too wide by one"),
    ("Gemma3ForCausalLM", "no soft cap"),
}
"""Faults that are none in a family."""


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_fault_in_attention_over_pages_is_refused(
    architecture: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault is found in every family that it affects; the models of other families pass."""

    def faulty(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(paged_attention).bind(*args, **kwargs).arguments
        return paged_attention(**(given | FAULTS[fault](**given)))

    monkeypatch.setattr(hf_attention, "paged_attention", faulty)

    if (architecture, fault) in HARMLESS:
        load(architecture, num_layers=3, seed=0)
    else:
        with pytest.raises(ConfigError, match=r"its logits with a paged KV cache differ from its own logits by \d"):
            load(architecture, num_layers=3, seed=0)
