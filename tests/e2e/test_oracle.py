"""The whole stack against `transformers`: front end, scheduler and worker as real processes, by checkpoint."""

from pathlib import Path

import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import serve
from tests.e2e.load import draw_prompts, generate_all, kv_memory

# One batch has prompts of 1 to 300 tokens. The outputs are long enough to cross block boundaries and to compete for
# memory.
PROMPT_LENGTHS = (1, 300, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 128, 150, 200, 250, 299)
OUTPUT_LENGTHS = (40, 24, 60, 33, 20, 48, 30, 40, 25, 64, 31, 40, 20, 50, 24, 36, 24, 30)


# `worker_svc/test_oracle.py` tests an engine for every architecture.
CHECKPOINTS = [
    ("LlamaForCausalLM", 8),
    ("Qwen3MoeForCausalLM", 8),
    ("Gemma3ForCausalLM", 8),
    ("GPT2LMHeadModel", 32),
    ("LlamaForCausalLM", 32),
    ("MistralForCausalLM", 16),
    ("Qwen2ForCausalLM", 8),
    ("Qwen3ForCausalLM", 16),
    ("MixtralForCausalLM", 16),
    ("Qwen2MoeForCausalLM", 16),
    ("Gemma2ForCausalLM", 16),
    ("Phi3ForCausalLM", 16),
    ("GPTNeoXForCausalLM", 16),
    ("FalconForCausalLM", 16),
    ("DeepseekV3ForCausalLM", 16),
    ("MptForCausalLM", 16),
    ("Llama4ForCausalLM", 8),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("architecture", "block_size"), CHECKPOINTS)
def test_greedy_tokens_are_those_of_transformers(architecture: str, block_size: int, tmp_path: Path) -> None:
    """Every delivered token is the reference's greedy choice, also when requests are preempted for lack of memory.

    Prompts are mixed and chunks are small. Near ties are counted; they are fewer than 1 in 1,000.
    """
    checkpoint = make_checkpoint(architecture, tmp_path / "model")
    oracle = Oracle(checkpoint)
    # The memory fits about one and a half of the largest requests.
    num_blocks = 512 // block_size
    prompts = draw_prompts(PROMPT_LENGTHS, oracle.vocab_size)
    with serve(
        checkpoint,
        f"--block-size={block_size}",
        f"--kv-cache-memory={kv_memory(checkpoint, num_blocks=num_blocks, block_size=block_size)}",
        "--max-num-batched-tokens=48",
        "--max-num-seqs=12",
        "--dtype=float32",
        "--num-threads=1",
    ) as served:
        answers = generate_all(served.grpc, prompts, OUTPUT_LENGTHS)
        assert served.metric("quire_preemptions_total") > 0, (
            "nothing was preempted: the pool is too large for this test"
        )
        # With windows, a block holds a part of the layers, and the same memory a multiple of these blocks.
        assert served.metric("quire_kv_blocks", state="total") % num_blocks == 0
        assert served.metric("quire_kv_blocks", state="held") == 0
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == answer.max_tokens
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    assert sum(answer.finished.usage.preemptions for answer in answers if answer.finished) > 0


@pytest.mark.drawn(2)
@pytest.mark.parametrize("architecture", ["Lfm2ForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize("num_checkpoints", [0, 12])
def test_turns_of_a_conversation_with_recurrent_state(tmp_path: Path, architecture: str, num_checkpoints: int) -> None:
    """Turns and forks have the reference's tokens, and begin at most a block before the end of the common prefix.

    The first request of a fork begins earlier. Without checkpoints no prompt tokens are cached.
    """
    checkpoint = make_checkpoint(architecture, tmp_path / "model")
    oracle = Oracle(checkpoint)
    first, *others = draw_prompts((70, 5, 33), oracle.vocab_size)
    prompts = [first, first, *others]
    answers, least = [], []
    with serve(
        checkpoint, "--max-num-batched-tokens=48", "--max-num-seqs=3", "--dtype=float32",
        f"--state-checkpoints={num_checkpoints}",
    ) as served:  # fmt: skip
        answers += generate_all(served.grpc, prompts, [20] * len(prompts))
        turns = [[*answer.prompt, *answer.tokens, 20, 21] for answer in answers]
        again = generate_all(served.grpc, turns, [20] * len(turns))
        least += [0, 0, 0, 0, *((len(turn) - 3) // 16 * 16 - 16 for turn in turns)]
        # The first one saves the state at the fork, and the others begin there.
        forks = [[*first[:50], number, *first[:20]] for number in (3, 4, 5)]
        for fork in forks:
            again += generate_all(served.grpc, [fork], [20])
        least += [0, 48, 48]
    tally = Tally()
    answers += again
    cached = [answer.finished.usage.cached_prompt_tokens for answer in answers if answer.finished is not None]
    for answer in answers:
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    if num_checkpoints:
        assert sorted(cached[:2]) == [0, 64]  # one of the two equal prompts waits for the other one
        assert all(found >= needed for found, needed in zip(cached, least, strict=True))
    else:
        assert not any(cached)
    assert tally.near_ties * 1000 < tally.tokens == 20 * len(least)


@pytest.mark.parametrize("host_cache", ["0", "1MiB"])
def test_preempted_requests_with_recurrent_state(tmp_path: Path, host_cache: str) -> None:
    """Requests that lose their blocks have the reference's tokens.

    They continue with their KV and state from host memory, or are computed again from the first token.
    """
    checkpoint = make_checkpoint("Lfm2ForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    prompts = draw_prompts((70, 5, 33, 150, 1, 20), oracle.vocab_size)
    with serve(
        checkpoint,
        "--block-size=8",
        # Room for the states of all rows, and for the blocks of one and a half of the largest requests.
        "--kv-cache-memory=90000",
        "--max-model-len=256",
        "--max-num-batched-tokens=48",
        "--max-num-seqs=6",
        "--state-checkpoints=0",
        "--dtype=float32",
        f"--host-cache={host_cache}",
    ) as served:
        answers = generate_all(served.grpc, prompts, [60] * len(prompts))
        assert served.metric("quire_preemptions_total") > 0
        assert (served.metric("quire_swapped_in_blocks_total") > 0) == (host_cache != "0")
    tally = Tally()
    for answer in answers:
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens == 60 * len(answers)
