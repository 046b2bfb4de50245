"""One principal attacks every shared resource of a front end at once, while another one works."""

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from measure.testbed.service import PATIENCE_S, ROOT, Served, serve

SECONDS = 60.0
"""Duration of each load."""
INTERVAL_S = 0.25
"""Interval between the calls of the principal that works."""
SLICE_S = 0.01
"""The other process runs for this long, and is stopped for as long: it has at most half a core."""
HONEST = ["honest", "reading", "batch"]
"""As many ordinary clients as attack with whole requests. All rows are in use under both loads."""
ATTACKS = [
    *("invalid", "large", "slow", "store", "grammar", "stalled", "endless", "idle"),
    *("chunked", "pipeline", "unread", "flood"),
]
TURN = [{"role": "user", "content": "What is 3 + 4?"}]


@dataclass(slots=True)
class Load:
    """What the principal that works saw while another process ran."""

    seconds: list[float] = field(default_factory=list)
    """Duration of each call."""
    failures: list[str] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    """Exchanges of the other process."""
    cores: float = 0.0
    """CPU time of the other process per second."""

    @property
    def p99(self) -> float:
        """The 99th percentile of the durations."""
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]

    def __str__(self) -> str:
        middle = sorted(self.seconds)[len(self.seconds) // 2]
        return (
            f"p50 {middle:.3f} s, p99 {self.p99:.3f} s, max {max(self.seconds):.3f} s of {len(self.seconds)} calls, "
            f"{len(self.failures)} failed {self.failures[:3]}; others, {self.cores:.2f} cores: {self.outcomes}"
        )


@contextmanager
def half_a_core(process: "subprocess.Popen[str]") -> Iterator[None]:
    """Stop and continue a process in turn."""
    done = threading.Event()

    def alternate() -> None:
        while not done.wait(SLICE_S) and process.poll() is None:
            process.send_signal(signal.SIGSTOP)
            done.wait(SLICE_S)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        process.send_signal(signal.SIGCONT)


async def work(http: str, first: str, load: Load) -> None:
    """Send a call at fixed times: a chat, a chat with a new schema, or a turn after a stored response."""
    headers = {"authorization": "Bearer alice-token"}

    async def call(number: int) -> None:
        path, body = "/v1/chat/completions", {"messages": TURN, "max_tokens": 8}
        if number % 8 == 3:
            schema = {"type": "object", "properties": {f"k{time.time_ns()}": {"enum": ["x"]}}}
            body["guided_json"] = schema
        elif number % 8 == 6:
            path, body = "/v1/responses", {"input": "x", "previous_response_id": first, "max_output_tokens": 8}
        began = time.monotonic()
        try:
            response = await client.post(path, json={**body})
            if response.status_code != 200:
                load.failures.append(f"{number % 8} {response.status_code} {response.text[:200]}")
        except httpx.HTTPError as error:
            load.failures.append(f"{number % 8} {error!r}")
        load.seconds.append(time.monotonic() - began)

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=http, headers=headers, timeout=60, trust_env=False, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        begin = time.monotonic()
        for number in range(int(SECONDS / INTERVAL_S)):
            await asyncio.sleep(begin + number * INTERVAL_S - time.monotonic())
            group.create_task(call(number))


def under(kinds: list[str], served: Served, first: str) -> Load:
    """Work while the other process runs."""
    load = Load()
    command = [
        sys.executable,
        "-m",
        "checks.chaos.attackers",
        served.http,
        "mallory-token",
        ",".join(kinds),
        str(SECONDS + 5),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # Wait until the request bodies are built, because building them takes CPU time that must not count.
            assert process.stdout.readline() == "ready\n"
            with half_a_core(process):
                asyncio.run(work(f"http://{served.http}", first, load))
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    load.cores, load.outcomes = json.loads(out)
    return load


def until_descriptors(process: psutil.Process, most: int) -> int:
    """Wait until a process has no more than this many file descriptors, and return the number."""
    end = time.monotonic() + PATIENCE_S
    while (count := process.num_fds()) > most and time.monotonic() < end:
        time.sleep(0.1)
    return count


@pytest.mark.release
def test_a_principal_that_attacks_in_every_way_hurts_no_other(tmp_path: Path) -> None:
    """All calls of another principal succeed, with a p99 at most twice that under an honest load from half a core.

    No process dies or loses its lease, every attack was made, and memory and file descriptors are given back.
    """
    principals = tmp_path / "principals.toml"
    principals.write_text(
        "".join(
            f'[principals.{name}]\ntokens = ["{hashlib.sha256(f"{name}-token".encode()).hexdigest()}"]\n'
            f'tenants = ["{name}"]\n'
            for name in ("alice", "mallory")
        )
    )
    flags = ("--policy=fair", f"--principals={principals}", "--stream-credit=1024", "--response-store-bytes=1000000")
    with serve("demo", *flags, "--stall-timeout-s=20") as served:
        first = httpx.post(
            f"http://{served.http}/v1/responses",
            json={"input": "What is 3 + 4?", "max_output_tokens": 8},
            headers={"authorization": "Bearer alice-token"},
            timeout=60,
            trust_env=False,
        ).json()["id"]
        pids = {child.pid for child in served.children()}
        frontend = psutil.Process(served.pid("frontend"))
        honest = under(HONEST, served, first)
        served.wait_until_empty()
        descriptors, memory = frontend.num_fds(), frontend.memory_info().rss
        attacked = under(ATTACKS, served, first)
        served.wait_until_empty()
        left = until_descriptors(frontend, descriptors + 4), frontend.memory_info().rss
        print(f"honest: {honest}\nattack: {attacked}")
        print(f"descriptors {descriptors} -> {left[0]}, memory {memory >> 20} -> {left[1] >> 20} MiB")
        assert {child.pid for child in served.children()} == pids
        assert not served.count_logged("front end lost")
        assert not served.count_logged("process hangs")
    assert honest.failures == attacked.failures == []
    assert {outcome.partition(" ")[0] for outcome in attacked.outcomes} >= set(ATTACKS) - {"idle"}
    assert left[0] <= descriptors + 4
    assert left[1] <= memory + (128 << 20)
    assert attacked.p99 <= 2 * honest.p99
