"""Quantised weights and quantised KV through the real processes, each against a reference that rounds as specified."""

from pathlib import Path

import pytest

from checks.oracle import ROUNDED_TIE, Oracle, Tally
from kernels.native.serving import native
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.quantised_checkpoints import make_gguf, make_pair, rounds_activations
from measure.testbed.service import serve
from tests.e2e.load import draw_prompts, generate_all, kv_memory

PROMPT_LENGTHS = (1, 120, 2, 9, 16, 17, 33, 64, 90, 100)
OUTPUT_LENGTHS = (40, 24, 60, 33, 20, 48, 30, 40, 25, 36)
NUM_BLOCKS, BLOCK_SIZE = 20, 8


def check(served_checkpoint: Path, oracle: Oracle, *flags: str) -> Tally:
    """Serves small requests that meet in memory, and returns how many tokens the oracle was asked about."""
    prompts = draw_prompts(PROMPT_LENGTHS, oracle.vocab_size)
    with serve(
        served_checkpoint,
        f"--block-size={BLOCK_SIZE}",
        "--max-num-batched-tokens=48",
        "--max-num-seqs=8",
        "--dtype=float32",
        "--num-threads=1",
        *flags,
    ) as served:
        answers = generate_all(served.grpc, prompts, OUTPUT_LENGTHS)
        assert served.metric("quire_preemptions_total") > 0
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == answer.max_tokens
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    return tally


def memory(checkpoint: Path) -> str:
    """The flag for a pool in float32 that is too small for all requests."""
    return f"--kv-cache-memory={kv_memory(checkpoint, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)}"


@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", ["gptq-int4-order", "fp8-block", "awq", "ct-int8-channel"])
def test_dequantised_weights_give_the_tokens_of_the_plain_model(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the weights are dequantised, tokens obey the rule for plain checkpoints."""
    monkeypatch.setenv("QUIRE_CPU_KERNELS", "off")
    pair = make_pair(layout, tmp_path)
    tally = check(pair.quantised, Oracle(pair.plain), memory(pair.plain))

    assert tally.near_ties * 100 < tally.tokens


@pytest.mark.release
@pytest.mark.skipif(native() is None, reason="needs the native CPU kernels")
def test_a_gguf_file_gives_the_tokens_of_its_dequantised_weights(tmp_path: Path) -> None:
    """The CPU kernels compute with the codes of a GGUF file and with activations in eight bits."""
    pair = make_gguf("Q4_K_M", tmp_path)
    oracle = Oracle(pair.plain, tie=ROUNDED_TIE)
    rounds_activations(oracle.model, head=True)
    tally = check(pair.quantised, oracle, memory(pair.plain))

    assert tally.near_ties * 50 < tally.tokens


@pytest.mark.every(3)
@pytest.mark.skipif(native() is None, reason="needs the native CPU kernels")
@pytest.mark.drawn(1)
@pytest.mark.parametrize("layout", ["awq", "ct-int8-channel", "gptq-int4"])
def test_weights_as_stored_give_the_tokens_of_the_model_with_rounded_activations(layout: str, tmp_path: Path) -> None:
    """The CPU kernels compute with the codes of the checkpoint and with activations in eight bits."""
    pair = make_pair(layout, tmp_path)
    oracle = Oracle(pair.plain, tie=ROUNDED_TIE)
    rounds_activations(oracle.model)
    tally = check(pair.quantised, oracle, memory(pair.plain))

    assert tally.near_ties * 50 < tally.tokens


@pytest.mark.every(3)
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("LlamaForCausalLM", "int8"),
        ("LlamaForCausalLM", "fp8"),
        ("Qwen3ForCausalLM", "int8"),
        ("MistralForCausalLM", "fp8"),
        ("Gemma2ForCausalLM", "int8"),
        ("GPT2LMHeadModel", "fp8"),
        ("Qwen3ForCausalLM", "int4"),
        ("Gemma2ForCausalLM", "int4"),
    ],
)
def test_quantised_kv_gives_the_tokens_of_a_reference_that_rounds_kv(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """Each head's key and value is rounded with its own scales, even across preemptions and chunks."""
    checkpoint = make_checkpoint(architecture, tmp_path / "model")
    memory_of_kv = memory_quantised(checkpoint, kind)
    tally = check(checkpoint, Oracle(checkpoint, kv=kind), memory_of_kv, f"--kv-cache-dtype={kind}")

    assert tally.near_ties * (10 if kind == "int4" else 50) < tally.tokens


def memory_quantised(checkpoint: Path, kind: str) -> str:
    """About a third or a sixth of `memory`, so that requests meet in memory although their KV is small."""
    full = int(kv_memory(checkpoint, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE))
    return f"--kv-cache-memory={full * (3 if kind == 'int4' else 5) // 16}"
