"""The trial at load accepts what rounding alone moves, in bfloat16 too, and finds every mistake over pages."""

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checks.driver import CPU, Driver, make_engine
from kernels.kv_cache_reference import read_kv
from kernels.paged_attention import paged_attention
from shared.config import ConfigError
from worker_svc.model import hf, hf_attention, hf_cache, hf_trial
from worker_svc.model.hf_cache import CacheModel
from worker_svc.model.hf_interface import InterfaceModel
from worker_svc.model.hf_model import TransformersModel

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


def gemma_4(*, num_hidden_layers: int, **sizes: Any) -> transformers.PretrainedConfig:
    """A Gemma 4 with heads of two sizes, whose last layer has no keys and values of its own."""
    kinds = ["sliding_attention", "full_attention"] * num_hidden_layers
    sizes |= {"global_head_dim": 64, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384}
    return transformers.Gemma4TextConfig(
        num_hidden_layers=num_hidden_layers,
        layer_types=[*kinds[: num_hidden_layers - 1], "full_attention"],
        num_kv_shared_layers=1,
        **sizes,
    )


FAMILIES: dict[str, tuple[Callable[..., transformers.PretrainedConfig], dict[str, Any]]] = {
    "MixtralForCausalLM": (transformers.MixtralConfig, SIZES | {"sliding_window": 4}),
    "Olmo2ForCausalLM": (transformers.Olmo2Config, SIZES),
    "Gemma3ForCausalLM": (transformers.Gemma3TextConfig, GEMMA),
    "Gemma2ForCausalLM": (transformers.Gemma2Config, GEMMA | {"attn_logit_softcapping": 5.0}),
    "Gemma4ForCausalLM": (gemma_4, SIZES | {"head_dim": 32, "sliding_window": 4}),
}
SEEDS = range(4)

Arguments = dict[str, Any]


def load(architecture: str, *, num_layers: int, seed: int) -> TransformersModel:
    """Return a model of bfloat16 weights, drawn by the seed; raises ConfigError if it is refused."""
    config_class, sizes = FAMILIES[architecture]
    config = config_class(**sizes, num_hidden_layers=num_layers)
    return hf.load(architecture, config, Path("none"), seed=seed, dtype=torch.bfloat16, device=CPU, num_positions=1024)


@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_correct_model_passes_whatever_its_weights_are(architecture: str) -> None:
    """Rounding to bfloat16, which many layers and routers of experts amplify, has none refused."""
    ways = {type(load(architecture, num_layers=24, seed=seed)) for seed in SEEDS}

    assert ways == {InterfaceModel}


def longrope(**mscales: float) -> transformers.PretrainedConfig:
    """A PhiMoE with a longrope scaling beyond 40 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 40, **mscales}
    factors = {"short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
    return transformers.PhimoeConfig(
        **SIZES | {"num_hidden_layers": 2, "num_local_experts": 4}, rope_parameters=rope | factors
    )


@pytest.mark.parametrize(("long_mscale", "is_served"), [(1.1, True), (1.3, False)])
def test_a_class_whose_rows_depend_on_longer_rows_is_refused(long_mscale: float, is_served: bool) -> None:
    """PhiMoE scales all rows of a batch by the length of the longest one; the trial has a row at the last positions."""
    config = longrope(short_mscale=1.1, long_mscale=long_mscale)

    def load_it() -> None:
        folder = Path("none")
        hf.load("PhimoeForCausalLM", config, folder, seed=0, dtype=torch.float32, device=CPU, num_positions=512)

    if is_served:
        load_it()
    else:
        with pytest.raises(ConfigError, match="differ from its own logits"):
            load_it()


def test_a_request_does_not_depend_on_the_length_of_its_neighbours(tmp_path: Path) -> None:
    """PhiMoE with two scales is served with the long one for every row."""
    config = longrope(short_mscale=1.1, long_mscale=1.3)
    config.architectures = ["PhimoeForCausalLM"]
    config.save_pretrained(tmp_path)
    driver = Driver(make_engine(tmp_path, max_num_seqs=2, dtype="float32", load_format="random"))

    def tokens() -> list[int]:
        row = driver.admit(list(range(30, 50)))
        driver.chunk(row, 20)
        for _ in range(10):
            driver.step()
        return driver.leave(row)[20:30]

    alone = tokens()
    longer = driver.admit(list(range(5, 105)))
    driver.chunk(longer, 100)

    assert tokens() == alone


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
    ("MixtralForCausalLM", "a scale that is not the model's"),  # The checkpoint has a scale, but the model ignores it.
    ("MixtralForCausalLM", "no soft cap"),  # it has none; and so on
    ("Olmo2ForCausalLM", "a scale that is not the model's"),
    ("Olmo2ForCausalLM", "no soft cap"),
    ("Olmo2ForCausalLM", "no window"),
    ("Olmo2ForCausalLM", "a window too wide by one"),
    ("Gemma3ForCausalLM", "no soft cap"),
    ("Gemma4ForCausalLM", "no scale"),
    ("Gemma4ForCausalLM", "no soft cap"),
}
"""Faults that are none in a family."""


@pytest.mark.drawn(12)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_fault_in_attention_over_pages_is_found(
    architecture: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paged attention with a fault is not used in any family that the fault affects, but in the others."""

    def faulty(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = inspect.signature(paged_attention).bind(*args, **kwargs).arguments
        return paged_attention(**(given | FAULTS[fault](**given)))

    monkeypatch.setattr(hf_attention, "paged_attention", faulty)

    model = load(architecture, num_layers=3, seed=0)

    assert isinstance(model, InterfaceModel if (architecture, fault) in HARMLESS else CacheModel)


def test_keys_and_values_of_a_wrong_layer_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer without its own keys and values, for which those of another layer of the same size are read."""
    find = hf_attention.Recording.source

    def faulty(recording: hf_attention.Recording, *arguments: Any) -> int | None:
        source = find(recording, *arguments)
        return None if source is None else source - 2

    assert isinstance(load("Gemma4ForCausalLM", num_layers=5, seed=0), InterfaceModel)

    monkeypatch.setattr(hf_attention.Recording, "source", faulty)

    assert isinstance(load("Gemma4ForCausalLM", num_layers=5, seed=0), CacheModel)


def test_a_layer_that_shares_only_its_keys_stores_its_own() -> None:
    """The source of a layer is one whose keys and values it uses."""
    recording = hf_attention.Recording()
    key, first, second = torch.zeros(3, 1, 1, 2, 4).unbind()

    sources = [recording.source(layer, key, value) for layer, value in enumerate((first, second, first))]

    assert sources == [None, None, 0]


CACHE_FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another row's slots": lambda slots: slots.flip(0),
    "a context that begins with the second token": lambda slots: slots.roll(-1, 1),
    "the first token only": lambda slots: slots[:, :1].expand_as(slots),
}
"""What each fault changes of the slots that are read for each row."""


@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_fault_in_reads_of_a_context_is_refused(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class without attention-backend support is refused if its cache returns other keys and values."""

    def faulty(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return read_kv(cache, CACHE_FAULTS[fault](slots), dtype)

    monkeypatch.setattr(hf_cache, "read_kv", faulty)
    config = transformers.GPTJConfig(vocab_size=384, n_positions=256, n_embd=64, n_layer=3, n_head=4, rotary_dim=8)

    with pytest.raises(ConfigError, match=r"its logits with a paged KV cache differ from its own logits by \d"):
        hf.load("GPTJForCausalLM", config, Path("none"), seed=0, dtype=torch.float32, device=CPU, num_positions=256)


def test_falcon_with_alibi_computes_what_generate_does() -> None:
    """The class's `eager` attention adds ALiBi twice. The default, which `generate` uses, adds it once."""
    config = transformers.FalconConfig(
        vocab_size=384, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, alibi=True, multi_query=False
    )
    torch.manual_seed(0)
    maker: Any = transformers.AutoModelForCausalLM
    reference = maker.from_config(copy.deepcopy(config), dtype=torch.float32).eval()

    model = hf.load(
        "FalconForCausalLM", config, Path("none"), seed=0, dtype=torch.float32, device=CPU, num_positions=64
    )

    with torch.inference_mode():
        assert hf_trial.distance(reference, model, CPU, 64) < 1e-5
