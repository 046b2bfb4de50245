"""Prefix sharing through the whole stack: the same tokens with less work."""

from pathlib import Path

import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import serve
from tests.e2e.load import draw_prompts, generate_all


@pytest.mark.drawn(1)
@pytest.mark.parametrize("prefix_cache", ["radix", "hash", "off"])
def test_shared_prefixes_give_the_same_tokens(prefix_cache: str, tmp_path: Path) -> None:
    """Requests with a common prefix deliver the oracle's tokens, and with the cache on compute it once.

    Requests run concurrently and one after the other. Under `radix`, later requests also find the part of the prefix
    that fills no block.
    """
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    prefix, *tails = draw_prompts([165, *range(3, 15)], oracle.vocab_size, seed=3)
    prompts = [prefix + tail for tail in tails]
    later = [prefix + tail[::-1] for tail in tails[3:6]]
    flags = ("--dtype=float32", "--num-threads=1", f"--prefix-cache={prefix_cache}", "--max-num-batched-tokens=64")
    with serve(checkpoint, *flags) as served:
        answers = generate_all(served.grpc, prompts, [30] * len(prompts))
        answers += generate_all(served.grpc, later, [40] * 3)
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
        return
    num_first = len(prompts) // 2
    assert [min(count, 160) for count in sorted(cached)[:num_first]] == [0] + [160] * (num_first - 1)
    assert scheduled < 2 * sum(len(answer.tokens) for answer in answers) + 3 * 200
    if prefix_cache == "hash":
        assert {count % 16 for count in cached} == {0}
    else:
        assert min(cached[len(prompts) :]) >= 165
