"""Host memory for cached prefixes on a real service: the same tokens, whatever moves there and whoever dies."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from checks.chaos.campaign import HOOKS
from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import ROOT, Served, serve
from quire import AsyncClient
from tests.e2e.load import Answer, generate, kv_memory

MODEL = ROOT / "shared" / "demo_model"
NUM_SESSIONS = 6
NUM_TURNS = 4
NEW_TOKENS, OUTPUT_TOKENS = 32, 48
"""Per turn. A session grows to 320 tokens, which are 20 blocks."""
_FIRST_TEXT = 16
"""The first token id that is not special."""


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The bundled model in `transformers`."""
    return Oracle(MODEL)


def _flags(*, num_blocks: int) -> tuple[str, ...]:
    """Settings of a service with so many device blocks, and host memory for 256 blocks."""
    memory = kv_memory(MODEL, num_blocks=num_blocks, block_size=16)
    host_memory = kv_memory(MODEL, num_blocks=256, block_size=16)
    return (f"--kv-cache-memory={memory}", f"--host-cache={host_memory}", "--dtype=float32", "--num-threads=1")


def _converse(served: Served, seed: int, vocab_size: int = 1024) -> list[Answer]:
    """Let sessions take turns, each of which continues the whole conversation; return all responses."""
    rng = random.Random(seed)
    answers: list[Answer] = []

    def new_text() -> list[int]:
        return [rng.randrange(_FIRST_TEXT, vocab_size) for _ in range(NEW_TOKENS)]

    async def session(client: AsyncClient, texts: list[list[int]]) -> None:
        history: list[int] = []
        for text in texts:
            answer = Answer([*history, *text], OUTPUT_TOKENS)
            answers.append(answer)
            await generate(client, answer)
            history = [*answer.prompt, *answer.tokens]

    async def run() -> None:
        async with AsyncClient(served.grpc) as client:
            sessions = [session(client, [new_text() for _ in range(NUM_TURNS)]) for _ in range(NUM_SESSIONS)]
            await asyncio.gather(*sessions)

    asyncio.run(run())
    return answers


def _check(answers: list[Answer], oracle: Oracle) -> None:
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == OUTPUT_TOKENS
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 200 < tally.tokens, tally


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_sessions_get_the_oracles_tokens(prefix_cache: str, oracle: Oracle) -> None:
    """Sessions that need four times the KV memory find their prefixes in host memory, also when preempted."""
    flags = (*_flags(num_blocks=28), f"--prefix-cache={prefix_cache}", "--capacity=max_utilization")
    with serve(MODEL, *flags) as served:
        answers = _converse(served, seed=1)
        assert served.metric("quire_preemptions_total") > 0, "nothing was preempted: there is too much memory"
        assert served.metric("quire_prefix_cache_hit_tokens_total", tier="host") > 0
        assert served.metric("quire_host_blocks_cached") > 0
        assert served.metric("quire_host_blocks_held") == served.metric("quire_kv_blocks", state="held") == 0
    _check(answers, oracle)


@pytest.mark.parametrize("family", ["Lfm2ForCausalLM", "Qwen3NextForCausalLM"])
def test_conversations_with_recurrent_state_return_from_host_memory(family: str, tmp_path: Path) -> None:
    """With host memory, turns of more conversations than the device holds begin where they would if it held them all.

    All tokens equal those of `transformers`, also after the worker's death.
    """
    checkpoint = make_checkpoint(family, tmp_path / "model")
    oracle = Oracle(checkpoint)
    # Two rows, and blocks for their longest sequences.
    memory = kv_memory(checkpoint, num_blocks=44, block_size=16, num_states=2 + 4)
    shares = []
    for host_cache in ("0", "16MiB"):
        with serve(
            checkpoint,
            f"--kv-cache-memory={memory}",
            f"--host-cache={host_cache}",
            "--max-num-seqs=2",
            "--state-checkpoints=4",
            "--max-model-len=352",
            "--dtype=float32",
            "--num-threads=1",
        ) as served:
            answers = _converse(served, seed=3, vocab_size=oracle.vocab_size)
            repeated = sum(len(answer.prompt) - NEW_TOKENS for answer in answers)
            hits = {
                tier: served.metric("quire_prefix_cache_hit_tokens_total", tier=tier) for tier in ("device", "host")
            }
            shares.append(sum(hits.values()) / repeated)
            if host_cache != "0":
                assert hits["host"] > 0
                assert served.metric("quire_host_states", state="cached") > 0
                os.kill(served.pid("worker"), signal.SIGKILL)
                answers += _converse(served, seed=4, vocab_size=oracle.vocab_size)
                served.wait_until_empty()
                assert served.metric("quire_host_states", state="held") == 0
        _check(answers, oracle)
    without, with_host = shares
    assert with_host > max(0.8, without), shares


@pytest.mark.every(2)
def test_deaths_in_the_middle_of_copies_lose_nothing(tmp_path: Path, oracle: Oracle) -> None:
    """The worker dies with half of a copy made in either direction, then the scheduler does: all tokens are right."""
    environ = {"PYTHONPATH": str(HOOKS), "CHAOS_COPIES": str(tmp_path)}
    answers: list[Answer] = []
    with serve(MODEL, *_flags(num_blocks=60), environ=environ) as served:
        for seed, victim in enumerate(("out", "in", "scheduler")):
            (tmp_path / victim).write_text(str(served.pid("scheduler")))
            answers += _converse(served, seed)
            assert not (tmp_path / victim).exists(), f"no copy, so {victim} did not die"
        served.wait_until_empty()
        assert served.metric("quire_prefix_cache_hit_tokens_total", tier="host") > 0
    _check(answers, oracle)
