"""Models whose KV behind sliding windows is freed, through real processes.

Sequences are longer than a window and the longest chunk together, so that rows use the blocks of their windows again.
"""

import asyncio
import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient
from tests.e2e.load import Answer, draw_prompts, generate, generate_all, kv_memory
from tests.gemma_4 import GEMMA_4

WINDOW = 64
BLOCK_SIZE = 16
CONFIGS: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM": {},
    "GptOssForCausalLM": {},
    "MinistralForCausalLM": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "MistralForCausalLM": {"num_hidden_layers": 3},
    "E2B": GEMMA_4["E2B"],
    "26B-A4B": GEMMA_4["26B-A4B"],
}
"""Fields of the configurations, by class or by Gemma 4.

Own code runs Ministral and Mistral. Mistral has a window in every layer.
"""
MODELS = pytest.mark.parametrize("model", CONFIGS)


def _serve(checkpoint: Path, num_blocks: int, *flags: str) -> AbstractContextManager[Served]:
    """Serve with the memory of `num_blocks` blocks of all layers."""
    return serve(
        checkpoint,
        f"--kv-cache-memory={kv_memory(checkpoint, num_blocks=num_blocks, block_size=BLOCK_SIZE)}",
        f"--block-size={BLOCK_SIZE}",
        "--max-num-seqs=6",
        "--dtype=float32",
        "--num-threads=1",
        "--max-model-len=1024",
        "--max-num-batched-tokens=256",
        *flags,
    )


def _make(model: str, folder: Path) -> Path:
    architecture = "Gemma4ForCausalLM" if model in GEMMA_4 else model
    return make_checkpoint(
        architecture, folder, sliding_window=WINDOW, max_position_embeddings=2048, std=0.1, **CONFIGS[model]
    )


def _check(oracle: Oracle, answers: list[Answer]) -> None:
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == answer.max_tokens
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 500 < tally.tokens, tally


@pytest.mark.drawn(4)
@MODELS
def test_shared_prefixes_and_drafts(model: str, tmp_path: Path) -> None:
    """Prompts in chunks, forks, choices, next turns and drafts have the reference's tokens, and reuse cached KV."""
    checkpoint = _make(model, tmp_path / "model")
    oracle = Oracle(checkpoint)
    common, *tails = draw_prompts((700, 100, 30, 9), oracle.vocab_size, seed=3)
    forks = [common[:500] + tail for tail in tails]
    with _serve(checkpoint, 400, "--prefix-cache=hash", "--speculation=ngram") as served:
        assert served.count_logged("KV behind sliding windows is freed") == 1
        choices = asyncio.run(_choices(served, common, 24))
        answers = generate_all(served.grpc, forks[:1], [24])
        turns = [[*answer.prompt, *answer.tokens, 20, 21] for answer in [*choices[:1], *answers]]
        answers += generate_all(served.grpc, [*forks[1:], *turns], [24] * 4)
        hits = served.metric("quire_prefix_cache_hit_tokens_total")
        served.wait_until_empty()
    _check(oracle, choices + answers)
    # Two choices share the prompt; each turn shares all of its tokens but those of the last block. The KV of the window
    # before the forks is gone, so the first fork computes its whole prompt, and the others share its beginning.
    expected = 2 * 700 + 724 + 624 + 2 * 500
    assert expected - 7 * BLOCK_SIZE <= hits <= expected


@pytest.mark.drawn(2)
@MODELS
@pytest.mark.parametrize(("host_cache", "remedy"), [("0", "recompute"), ("16MiB", "swap")])
def test_preemption(model: str, host_cache: str, remedy: str, tmp_path: Path) -> None:
    """Requests that are preempted for memory, and swapped or computed again, have the reference's tokens."""
    checkpoint = _make(model, tmp_path / "model")
    oracle = Oracle(checkpoint)
    prompts = draw_prompts((300, 280, 290, 310), oracle.vocab_size, seed=4)
    num_blocks = 88 if model == "GptOssForCausalLM" else 102
    with _serve(checkpoint, num_blocks, f"--host-cache={host_cache}") as served:
        assert served.count_logged("KV behind sliding windows is freed") == 1
        answers = generate_all(served.grpc, prompts, [400] * len(prompts))
        preemptions = served.metric("quire_preemptions_total", remedy=remedy)
        served.wait_until_empty()
    _check(oracle, answers)
    assert preemptions > 0, "nothing was preempted: the pool is too large for this test"


NUM_SESSIONS, NUM_TURNS = 8, 3
NEW_TOKENS, OUTPUT_TOKENS = 100, 20
"""Per turn. A session grows to 360 tokens."""


@pytest.mark.drawn(4)
@MODELS
def test_sessions_return_from_host_memory(model: str, tmp_path: Path) -> None:
    """Turns of more sessions than fit on the device continue from host memory, with the reference's tokens."""
    checkpoint = _make(model, tmp_path / "model")
    oracle = Oracle(checkpoint)
    cached = {}
    for host_cache in ("0", "16MiB"):
        with _serve(checkpoint, 60, f"--host-cache={host_cache}") as served:
            assert served.count_logged("KV behind sliding windows is freed") == 1
            answers = _take_turns(served, oracle.vocab_size)
            cached[host_cache] = served.metric("quire_prefix_cache_hit_tokens_total")
            from_host = served.metric("quire_prefix_cache_hit_tokens_total", tier="host")
            served.wait_until_empty()
        _check(oracle, answers)
        assert (from_host > 0) == (host_cache != "0")
    per_turn = NEW_TOKENS + OUTPUT_TOKENS
    most = NUM_SESSIONS * sum(turn * per_turn for turn in range(1, NUM_TURNS))
    assert cached["16MiB"] > 0.9 * most, "prefixes were computed again in spite of the host memory"
    assert cached["0"] < 0.5 * most, "the device holds most sessions, so the test shows nothing"


def _take_turns(served: Served, vocab_size: int) -> list[Answer]:
    """Let sessions take turns one after the other, each of which continues its whole conversation."""
    texts = draw_prompts((NEW_TOKENS,) * NUM_SESSIONS * NUM_TURNS, vocab_size, seed=6)
    answers: list[Answer] = []
    histories: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
    for _ in range(NUM_TURNS):
        for number, history in enumerate(histories):
            (answer,) = generate_all(served.grpc, [[*history, *texts.pop()]], [OUTPUT_TOKENS])
            histories[number] = [*answer.prompt, *answer.tokens]
            answers.append(answer)
    return answers


@pytest.mark.drawn(1)
@MODELS
def test_lost_worker_and_scheduler(model: str, tmp_path: Path) -> None:
    """After `kill -9` of the worker and then of the scheduler, all streams continue with the reference's tokens."""
    checkpoint = _make(model, tmp_path / "model")
    oracle = Oracle(checkpoint)
    answers = [Answer(prompt, 150) for prompt in draw_prompts((600, 700, 20), oracle.vocab_size, seed=5)]
    with _serve(checkpoint, 400) as served:
        asyncio.run(_run_with_kills(served, answers))
        served.wait_until_empty()
    _check(oracle, answers)


async def _run_with_kills(served: Served, answers: list[Answer]) -> None:
    async with AsyncClient(served.grpc) as client, asyncio.timeout(240), asyncio.TaskGroup() as tasks:
        for answer in answers:
            tasks.create_task(generate(client, answer))
        for service, num_tokens in (("worker", 20), ("scheduler", 80)):
            while min(len(answer.tokens) for answer in answers) < num_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(served.pid(service), signal.SIGKILL)


async def _choices(served: Served, prompt: list[int], count: int) -> list[Answer]:
    """Return three greedy choices for one prompt."""
    async with AsyncClient(served.grpc) as client:
        result = await client.generate(
            token_ids=prompt, max_tokens=count, temperature=0, n=3, ignore_eos=True, timeout=240
        ).result()
    return [Answer(prompt, count, list(choice.token_ids)) for choice in result.choices]
