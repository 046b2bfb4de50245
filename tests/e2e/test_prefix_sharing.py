"""Prefix sharing through the whole stack: the same tokens with less work."""

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.harness import serve
from tests.e2e.load import draw_prompts, generate_all
from tests.e2e.oracle import Oracle, Tally


@pytest.mark.parametrize("prefix_cache", ["hash", "off"])
def test_shared_prefixes_give_the_same_tokens(prefix_cache: str, tmp_path: Path) -> None:
    """Requests with a common prefix, at the same time and one after the other, deliver the oracle's tokens with the
    cache on and off; with it on the prefix is computed once."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    prefix, *tails = draw_prompts([160, *range(3, 15)], oracle.vocab_size, seed=3)
    prompts = [prefix + tail for tail in tails]
    flags = ("--dtype=float32", "--num-threads=1", f"--prefix-cache={prefix_cache}", "--max-num-batched-tokens=64")
    with serve(checkpoint, *flags) as served:
        answers = generate_all(served.grpc, prompts, [30] * len(prompts))
        answers += generate_all(served.grpc, prompts[:3], [40] * 3)
        scheduled = served.metric("quire_scheduled_tokens_total")
        hits = served.metric("quire_prefix_cache_hit_tokens_total")
        assert served.metric("quire_kv_blocks", state="held") == 0
    tally = Tally()
    for answer in answers:
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 1000 < tally.tokens, tally
    cached = [answer.finished.usage.cached_prompt_tokens for answer in answers if answer.finished]
    assert sum(cached) == hits
    if prefix_cache == "off":
        assert hits == 0
    else:
        assert sorted(cached)[: len(prompts) // 2] == [0] + [160] * (len(prompts) // 2 - 1)
        assert scheduled < 2 * sum(len(answer.tokens) for answer in answers) + 3 * 200
