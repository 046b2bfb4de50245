"""Loading: what a folder and a few settings become."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checks.driver import CPU, Driver, make_engine
from measure.testbed.checkpoints import MAX_POSITIONS, SLIDING_WINDOW, VOCAB_SIZE, edit_config, make_checkpoint
from shared.config import WorkerConfig
from shared.kv_sizes import count_blocks
from tests.worker_svc.oracle import Oracle, Verdict
from worker_svc.memory.kv_pool import block_bytes
from worker_svc.model.base import KVShape
from worker_svc.model.loader import load_model


def test_the_kv_formula_counts_kv_heads() -> None:
    """Llama-3.1-8B in bf16 needs 128 KiB a token: 2 x 32 layers x 8 KV heads x 128 x 2 bytes."""
    shapes = [KVShape(num_kv_heads=8, head_dim=128)] * 32

    assert block_bytes(shapes, 16, torch.bfloat16) == 16 * 128 * 1024
    assert count_blocks(10 * 2**30, 2**21, 10**9, "setting") == 5120
    assert count_blocks(10 * 2**30, 2**21, 100, "setting") == 100


def test_random_weights_need_only_a_configuration(tmp_path: Path) -> None:
    """`load_format=random` serves a folder with nothing but config.json, and draws the same weights every time."""
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path)
    (folder / "model.safetensors").unlink()

    answers = [Driver(make_engine(folder, load_format="random")).generate([1, 2, 3], 8) for _ in range(2)]

    assert answers[0] == answers[1]


def test_end_tokens_outside_the_vocabulary_are_ignored(tmp_path: Path) -> None:
    """End tokens are read from both files, without those outside the vocabulary."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    edit_config(folder, lambda config: config.update(eos_token_id=[7, -1, VOCAB_SIZE - 1]))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB_SIZE, 3, 128_009]}))

    _, description = load_model(WorkerConfig(model=str(folder)), CPU)

    assert description.eos_token_ids == (3, 7, VOCAB_SIZE - 1)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    """Weights in several files give the same tokens; the fingerprints differ."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path / "one")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]) > 1

    answers = [Driver(make_engine(tmp_path / name)).generate([5, 6, 7], 12) for name in ("one", "many")]
    prints = [load_model(WorkerConfig(model=str(tmp_path / name)), CPU)[1].fingerprint for name in ("one", "many")]

    assert answers[0] == answers[1]
    assert prints[0] != prints[1]


def test_a_head_apart_from_the_embedding_is_used_whatever_the_configuration_says(tmp_path: Path) -> None:
    """A checkpoint that holds a head and another embedding is not tied, as in `transformers`."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))

    answer = Driver(make_engine(folder)).generate([5, 6, 7], 12)

    Oracle(folder).judge([5, 6, 7], answer, Verdict())


def test_a_mistral_with_types_of_layers_is_a_ministral(tmp_path: Path) -> None:
    """`transformers` decides by the configuration, so the class that config.json names may be either."""
    folder = make_checkpoint("MistralForCausalLM", tmp_path)
    edit_config(folder, lambda config: config.update(layer_types=["full_attention", "sliding_attention"]))
    prompt = list(range(3 * SLIDING_WINDOW))

    answer = Driver(make_engine(folder)).generate(prompt, 12)

    Oracle(folder).judge(prompt, answer, Verdict())


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_scaled_rotary_embeddings_equal_generate(rope: dict[str, Any], tmp_path: Path) -> None:
    """Each scaling of positions that the hand-written path takes gives the oracle's tokens on a long prompt."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path, rope_parameters=rope | {"rope_theta": 10000.0})
    prompt = [(7 * i) % 384 for i in range(400)]

    answer = Driver(make_engine(folder)).generate(prompt, 16)

    Oracle(folder).judge(prompt, answer, Verdict())


@pytest.mark.parametrize("architecture", ["Phi3ForCausalLM", "LlamaForCausalLM"])
def test_longrope_has_one_set_of_factors_for_all_lengths(architecture: str, tmp_path: Path) -> None:
    """The long factors if longer sequences than the original ones are allowed, otherwise the short ones.

    `transformers` uses the long factors from the original length on, so its tokens equal ours for long prompts. For
    short prompts they are equal if its short factors are the long ones.
    """
    short, long = [1.0 + i / 8 for i in range(8)], [2.0 + i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    folder, all_long = (
        make_checkpoint(
            architecture,
            tmp_path / name,
            rope_parameters=rope | {"original_max_position_embeddings": 64, "short_factor": factors},
            original_max_position_embeddings=64,
        )
        for name, factors in (("model", short), ("all_long", long))
    )
    prompts = {length: [(7 * i) % VOCAB_SIZE for i in range(length)] for length in (20, 150)}

    driver = Driver(make_engine(folder))
    assert driver.engine.limits.max_model_len == MAX_POSITIONS
    Oracle(folder).judge(prompts[150], driver.generate(prompts[150], 12), Verdict())
    long_answer = driver.generate(prompts[20], 12)
    Oracle(all_long).judge(prompts[20], long_answer, Verdict())
    short_answer = Driver(make_engine(folder, max_model_len=64)).generate(prompts[20], 12)
    Oracle(folder).judge(prompts[20], short_answer, Verdict())

    assert short_answer != long_answer
    prints = {load_model(WorkerConfig(model=str(folder), max_model_len=n), CPU)[1].fingerprint for n in (64, 65, 0)}
    assert len(prints) == 2, "KV of other factors is never shared"
