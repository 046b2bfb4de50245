"""The disk cache on a real service: the same tokens, whoever restarts, and whatever happens to the files."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from checks.chaos.campaign import HOOKS
from checks.oracle import Oracle, Tally
from measure.testbed.service import ROOT, Served, serve, until
from quire import AsyncClient
from tests.e2e.load import Answer, generate, kv_memory

MODEL = ROOT / "shared" / "demo_model"
NUM_SESSIONS = 6
NUM_TURNS = 3
NEW_TOKENS, OUTPUT_TOKENS = 48, 32
"""Per turn. A session grows to 240 tokens, which are 15 blocks."""
_FIRST_TEXT = 16
"""The first token id that is not special."""


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The bundled model in `transformers`."""
    return Oracle(MODEL)


def _flags(folder: Path, *more: str) -> tuple[str, ...]:
    """Settings of a service whose device and host memory hold half of the sessions, and whose disk holds all."""
    memory = kv_memory(MODEL, num_blocks=24, block_size=16)
    host_memory = kv_memory(MODEL, num_blocks=24, block_size=16)
    flags = (f"--kv-cache-memory={memory}", f"--host-cache={host_memory}", f"--disk-cache={folder}")
    return (*flags, "--disk-cache-bytes=64MiB", "--dtype=float32", "--num-threads=1", *more)


def _converse(served: Served, seed: int) -> list[Answer]:
    """Let sessions take turns, each of which continues the whole conversation; return all responses."""
    rng = random.Random(seed)
    texts = [
        [[rng.randrange(_FIRST_TEXT, 1024) for _ in range(NEW_TOKENS)] for _ in range(NUM_TURNS)]
        for _ in range(NUM_SESSIONS)
    ]
    answers: list[Answer] = []

    async def run() -> None:
        histories: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
        async with AsyncClient(served.grpc) as client:
            for turn in range(NUM_TURNS):
                for session in range(NUM_SESSIONS):
                    answer = Answer([*histories[session], *texts[session][turn]], OUTPUT_TOKENS)
                    answers.append(answer)
                    await generate(client, answer)
                    histories[session] = [*answer.prompt, *answer.tokens]

    asyncio.run(run())
    return answers


def _check(answers: list[Answer], oracle: Oracle) -> None:
    tally = Tally()
    for answer in answers:
        assert len(answer.tokens) == OUTPUT_TOKENS
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
    assert tally.near_ties * 200 < tally.tokens, tally


def _is_written(served: Served) -> bool:
    """Return whether many blocks are on disk, and no copy is under way."""
    return served.metric("quire_disk_blocks", state="cached") > NUM_SESSIONS


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_sessions_get_the_oracles_tokens(prefix_cache: str, tmp_path: Path, oracle: Oracle) -> None:
    """Sessions that need twice the memory of device and host find their prefixes on disk."""
    with serve(MODEL, *_flags(tmp_path, f"--prefix-cache={prefix_cache}")) as served:
        answers = _converse(served, seed=1)
        assert served.metric("quire_prefix_cache_hit_tokens_total", tier="disk") > 0
        assert served.metric("quire_disk_copied_blocks_total", direction="read") > 0
        served.wait_until_empty()
        assert served.metric("quire_host_blocks_held") == served.metric("quire_kv_blocks", state="held") == 0
    _check(answers, oracle)


def test_a_restarted_worker_finds_its_blocks(tmp_path: Path, oracle: Oracle) -> None:
    """After the worker process was killed, the same conversations find their prefixes on disk."""
    with serve(MODEL, *_flags(tmp_path)) as served:
        answers = _converse(served, seed=2)
        until(lambda: _is_written(served), "blocks are on disk")
        before = served.pid("worker")
        next(each for each in served.children("worker") if each.pid == before).kill()
        until(lambda: any(each.pid != before for each in served.children("worker")), "the worker has restarted")
        # The counters of the new worker begin at 0.
        until(
            lambda: served.metric("quire_prefix_cache_hit_tokens_total") == 0 and _is_written(served),
            "the new worker has found its blocks",
        )
        answers += _converse(served, seed=2)
        assert served.metric("quire_prefix_cache_hit_tokens_total", tier="disk") > 0
    _check(answers, oracle)


@pytest.mark.every(2)
def test_deaths_in_the_middle_of_copies_lose_nothing(tmp_path: Path, oracle: Oracle) -> None:
    """The worker dies while it writes a file, and while it reads one. Then the scheduler dies. All tokens are right."""
    orders, folder = tmp_path / "orders", tmp_path / "kv"
    orders.mkdir()
    environ = {"PYTHONPATH": str(HOOKS), "CHAOS_DISK": str(orders)}
    answers: list[Answer] = []
    with serve(MODEL, *_flags(folder), environ=environ) as served:
        answers += _converse(served, seed=4)
        for order in ("write", "read"):
            (orders / order).touch()
            answers += _converse(served, seed=5 if order == "write" else 4)
            assert not (orders / order).exists(), f"no {order}, so the worker did not die"
        next(each for each in served.children("scheduler")).kill()
        answers += _converse(served, seed=4)
        served.wait_until_empty()
        assert served.metric("quire_prefix_cache_hit_tokens_total", tier="disk") > 0
    assert not list(folder.glob("*/*.tmp"))
    _check(answers, oracle)


def test_a_full_or_slow_disk_costs_only_hits(tmp_path: Path, oracle: Oracle) -> None:
    """Requests finish with the same tokens while no block can be written, and while each read takes 2 s."""
    orders, folder = tmp_path / "orders", tmp_path / "kv"
    orders.mkdir()
    environ = {"PYTHONPATH": str(HOOKS), "CHAOS_DISK": str(orders)}
    with serve(MODEL, *_flags(folder), environ=environ) as served:
        (orders / "full").touch()
        answers = _converse(served, seed=6)
        assert served.metric("quire_disk_blocks", state="cached") == 0
        assert not _files(folder)
        (orders / "full").unlink()
        # After a failure, writing pauses. Later, only blocks that move after the pause are written.
        for seed in range(7, 100):
            answers += _converse(served, seed)
            if _is_written(served):
                break
        assert _is_written(served)
        (orders / "slow").touch()
        answers += _converse(served, seed)
        (orders / "slow").unlink()
    _check(answers, oracle)


def test_a_worker_restarts_without_its_full_disk(tmp_path: Path, oracle: Oracle) -> None:
    """A worker that restarts while its folder cannot be opened serves without it. The next restart finds the blocks."""
    orders, folder = tmp_path / "orders", tmp_path / "kv"
    orders.mkdir()
    environ = {"PYTHONPATH": str(HOOKS), "CHAOS_DISK": str(orders)}
    with serve(MODEL, *_flags(folder), environ=environ) as served:
        answers = _converse(served, seed=8)
        until(lambda: _is_written(served), "blocks are on disk")
        (orders / "full").touch()
        os.kill(served.pid("worker"), signal.SIGKILL)
        answers += _converse(served, seed=8)
        assert served.metric("quire_disk_blocks", state="total") == 0
        (orders / "full").unlink()
        os.kill(served.pid("worker"), signal.SIGKILL)
        answers += _converse(served, seed=8)
        assert served.metric("quire_prefix_cache_hit_tokens_total", tier="disk") > 0
    _check(answers, oracle)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path, oracle: Oracle) -> None:
    """A service that finds truncated, corrupted and foreign files deletes them and computes the tokens again."""
    with serve(MODEL, *_flags(tmp_path)) as served:
        answers = _converse(served, seed=3)
        until(lambda: _is_written(served), "blocks are on disk")
    files = _files(tmp_path)
    for number, path in enumerate(files):
        content = bytearray(path.read_bytes())
        if number % 3 == 0:
            content = content[:-1]
        elif number % 3 == 1:
            content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with serve(MODEL, *_flags(tmp_path)) as served:
        answers += _converse(served, seed=3)
        refused = {
            reason: served.metric("quire_disk_refused_files_total", reason=reason)
            for reason in ("truncated", "damaged", "foreign")
        }
        assert refused["truncated"] == -(-len(files) // 3)
        assert refused["damaged"] > 0
        assert refused["foreign"] == 0
        until(lambda: _is_written(served), "blocks are on disk")
    num_files = len(_files(tmp_path))
    with serve(MODEL, *_flags(tmp_path, "--kv-cache-dtype=int8")) as served:
        until(
            lambda: served.metric("quire_disk_refused_files_total", reason="foreign") == num_files,
            "the foreign files are refused",
        )
        assert served.metric("quire_disk_blocks", state="cached") == 0
    _check(answers, oracle)
