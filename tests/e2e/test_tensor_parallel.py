"""`quire serve --tensor-parallel-size 2`: two ranks serve as one worker, and a lost rank is a lost worker."""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from checks.oracle import Oracle, Tally
from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import PATIENCE_S, QUIRE, Served, is_alive, serve
from quire import AsyncClient, Client
from tests.e2e.load import Answer, draw_prompts
from tests.e2e.test_worker_death import _stream


def followers(served: Served) -> list[psutil.Process]:
    """The processes that workers have started."""
    return [child for worker in served.children("worker") for child in worker.children()]


def test_two_ranks_serve_and_survive_as_one_worker(tmp_path: Path) -> None:
    """Tokens equal the oracle's; `kill -9` of a follower during streaming causes a pause.

    Nothing remains at the end.
    """
    checkpoint = make_checkpoint("Qwen2ForCausalLM", tmp_path / "model")
    oracle = Oracle(checkpoint)
    answers = [Answer(prompt, 300) for prompt in draw_prompts([3, 30, 100], oracle.vocab_size, seed=2)]
    with serve(checkpoint, "--dtype=float32", "--num-threads=1", "--tensor-parallel-size=2") as served:
        listed = subprocess.run(
            [*QUIRE, "workers", "--target", served.grpc], capture_output=True, text=True, check=True
        )
        (before,) = followers(served)
        asyncio.run(_run_with_a_kill(served, answers, before.pid))
        (after,) = followers(served)
        with Client(served.grpc) as client:
            schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            shaped = client.generate("x", json_schema=schema, max_tokens=40, temperature=1.0, seed=1).result()

    assert "2 ranks, cpu" in listed.stdout
    assert after.pid != before.pid
    assert '"a"' in shaped.text
    tally = Tally()
    for answer in answers:
        oracle.check_greedy(answer.prompt, answer.tokens, tally)
        assert answer.finished is not None
        assert answer.finished.usage.preemptions == 1
    assert tally.near_ties * 1000 < tally.tokens, tally


async def _run_with_a_kill(served: Served, answers: list[Answer], pid: int) -> None:
    flowing = asyncio.Semaphore(0)
    async with AsyncClient(served.grpc) as client:
        streams = [asyncio.create_task(_stream(client, answer, flowing)) for answer in answers]
        for _ in answers:
            await flowing.acquire()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*streams)


@pytest.mark.every(3)
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("architecture", "size", "reason"),
    [
        ("LlamaForCausalLM", "3", "tensor_parallel_size: 3 does not divide the model's 4 query heads; use a divisor"),
        ("GPT2LMHeadModel", "2", "tensor_parallel_size: 2 is not supported for GPT2LMHeadModel; use 1"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(architecture: str, size: str, reason: str, tmp_path: Path) -> None:
    """The command ends with a one-line error that names the setting, and leaves no rank file."""
    checkpoint = make_checkpoint(architecture, tmp_path)
    command = [*QUIRE, "worker", "--model", str(checkpoint), "--tensor-parallel-size", size, "--device", "cpu"]
    left = tmp_path / "left"
    left.mkdir()
    environment = os.environ | {"TMPDIR": str(left)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)

    assert done.returncode == 1
    assert list(left.glob("quire-ranks-*")) == []
    assert f"quire worker: {reason}" in done.stderr.splitlines()


@pytest.mark.every(3)
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("struck", "exit_code", "line"),
    [
        ("follower", 1, "quire worker: rank 1 exited (exit code 143), so the worker exits"),
        ("rank 0", 0, None),
    ],
)
def test_a_signal_to_one_rank_ends_all_while_they_load(
    struck: str, exit_code: int, line: str | None, tmp_path: Path
) -> None:
    """SIGTERM is a failure of the worker if a follower gets it, and an orderly stop if rank 0 does."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    left = tmp_path / "left"
    left.mkdir()
    with kept_from_opening(checkpoint / "model.safetensors") as opened:
        process = subprocess.Popen(
            [*QUIRE, "worker", f"--model={checkpoint}", "--tensor-parallel-size=2", "--device=cpu", "--num-threads=1"],
            env=os.environ | {"TMPDIR": str(left)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            opened()
            (follower,) = psutil.Process(process.pid).children()
            os.kill(follower.pid if struck == "follower" else process.pid, signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
            psutil.wait_procs([follower], timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()

    assert process.returncode == exit_code, errors
    assert not is_alive(follower)
    assert [each for each in errors.splitlines() if each.startswith("quire worker:")] == ([line] if line else [])
    assert list(left.glob("quire-ranks-*")) == []


@pytest.mark.every(3)
@pytest.mark.drawn(1)
@pytest.mark.parametrize(("rank", "exit_code"), [(0, 0), (1, 143)])
def test_a_signal_ends_a_rank_that_waits_for_the_others(rank: int, exit_code: int, tmp_path: Path) -> None:
    """SIGTERM ends a rank whose peer never starts, although it waits in native code for up to 15 minutes."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as leader:
        port = leader.getsockname()[1]
        leader.settimeout(PATIENCE_S)
        if rank == 0:
            leader.close()
        process = subprocess.Popen(
            [*QUIRE, "worker", f"--model={checkpoint}", "--tensor-parallel-size=2", "--device=cpu", "--num-threads=1"],
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with _connected(port) if rank == 0 else leader.accept()[0]:
                process.send_signal(signal.SIGTERM)
                _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
            process.wait()

    assert process.returncode == exit_code, errors
    assert "Traceback" not in errors


@pytest.mark.release
def test_a_signal_ends_rank_0_while_a_follower_hangs(tmp_path: Path) -> None:
    """SIGTERM ends rank 0 while it waits for a follower within a step; the request continues afterwards."""
    checkpoint = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    with serve(checkpoint, "--num-threads=1", "--tensor-parallel-size=2") as served, Client(served.grpc) as client:
        (worker,) = served.children("worker")
        (follower,) = followers(served)
        follower.suspend()
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(lambda: client.generate(token_ids=[5], max_tokens=4, ignore_eos=True).result())
            end = time.monotonic() + PATIENCE_S
            while served.metric("vllm:num_requests_running") == 0:
                assert time.monotonic() < end
                time.sleep(0.02)
            worker.terminate()
            _, alive = psutil.wait_procs([worker, follower], timeout=PATIENCE_S)
            assert not alive
            assert len(answer.result(PATIENCE_S).token_ids) == 4
        assert served.count_logged("stopped while it waited for other ranks") == 1


def _connected(port: int) -> socket.socket:
    """A connection to a port of this machine, as soon as a process listens there."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)


@contextlib.contextmanager
def kept_from_opening(file: Path) -> Iterator[Callable[[], None]]:
    """Block other processes when they open a file; the value is a function that awaits the first one.

    This is a lease (fcntl(2)), which the kernel ends after 45 seconds.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    held = os.open(file, os.O_RDWR)
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def opened() -> None:
        end = time.monotonic() + PATIENCE_S
        while fcntl.fcntl(held, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
            assert time.monotonic() < end
            time.sleep(0.02)

    try:
        yield opened
    finally:
        os.close(held)
        signal.signal(signal.SIGIO, before)
