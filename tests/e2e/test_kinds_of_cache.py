"""Models with other kinds of cache in pairs of features: latent attention, sliding windows, and recurrent state.

The features are preemption by recomputation and by swapping, both prefix caches, and drafts.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import Client
from tests.covering import Case, covering
from tests.e2e.load import draw_prompts, generate_all, kv_memory

FEATURES = {
    "model": (
        *("DeepseekV3ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "MistralForCausalLM"),
        *("FalconForCausalLM", "Qwen3NextForCausalLM"),
    ),
    "preemption": ("swap", "recompute"),
    "prefix_cache": ("radix", "hash"),
    "speculation": ("ngram", "off"),
}
WINDOWED = ("Gemma3ForCausalLM", "Gemma4ForCausalLM", "MistralForCausalLM")
"""Models of which a worker frees the KV behind windows, with own code in the case of Mistral."""
COUNT = 40
CASES = [pytest.param(case, id="-".join(case.values())) for case in covering(FEATURES)]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_transformers(case: Case, tmp_path: Path) -> None:
    """Preempted requests, requests that reuse a prefix, and all choices of a request have the reference's tokens."""
    checkpoint = make_checkpoint(case["model"], tmp_path / "model")
    oracle = Oracle(checkpoint)
    # A row has two states with drafts.
    num_states = 6 * (1 if case["speculation"] == "off" else 2) + 6
    memory = kv_memory(checkpoint, num_blocks=24, block_size=8, num_states=num_states)
    common, *tails = draw_prompts((30, 1, 3, 9, 17, 28, 5), oracle.vocab_size, seed=3)
    prompts = [common[: 30 - 2 * index] + tail * 2 for index, tail in enumerate(tails)]
    with (
        serve(
            checkpoint,
            f"--prefix-cache={case['prefix_cache']}",
            f"--speculation={case['speculation']}",
            f"--host-cache={'1MiB' if case['preemption'] == 'swap' else '0'}",
            f"--kv-cache-memory={memory}",
            "--max-num-seqs=6",
            "--state-checkpoints=6",
            "--dtype=float32",
            "--num-threads=1",
            "--block-size=8",
            "--max-model-len=512",
            "--max-num-batched-tokens=64",
        ) as served,
        ThreadPoolExecutor(1) as pool,
    ):
        assert served.count_logged("KV behind sliding windows is freed") == (case["model"] in WINDOWED)
        choices = pool.submit(_choices, served, common)
        answers = generate_all(served.grpc, prompts, [COUNT] * len(prompts))
        texts = choices.result()
        turns = [[*answer.prompt, *answer.tokens, 20, 21] for answer in answers[:3]]
        answers += generate_all(served.grpc, turns, [COUNT] * len(turns))
        preemptions = served.metric("quire_preemptions_total")
        hits = served.metric("quire_prefix_cache_hit_tokens_total")
        served.wait_until_empty()
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == COUNT
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    for tokens in texts:
        assert len(tokens) == COUNT
        oracle.check_greedy(common, tokens, tally)
    assert tally.near_ties * 500 < tally.tokens, tally
    assert preemptions > 0, "nothing was preempted: the pool is too large for this test"
    assert hits > 0


def _choices(served: Served, prompt: list[int]) -> list[list[int]]:
    """Return the tokens of three greedy choices for one prompt."""
    with Client(served.grpc) as client:
        result = client.generate(
            token_ids=prompt, max_tokens=COUNT, temperature=0, n=3, ignore_eos=True, timeout=240
        ).result()
    return [list(choice.token_ids) for choice in result.choices]
