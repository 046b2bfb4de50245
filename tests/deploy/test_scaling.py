"""Autoscaling: the queries and rules of the rendered ScaledObject drive 1, 8 and 1 workers; nothing is lost.

A real Prometheus evaluates the queries. A small loop replaces KEDA and the HorizontalPodAutoscaler. One minute in the
manifest takes a second here. Worker steps have a fixed duration.
"""

import asyncio
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from measure.testbed.service import QUIRE, free_ports
from quire.aio import AsyncClient
from tests.deploy.manifests import ROOT, needs_tools, of_kind

PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
_MINUTE_S = 1.0
"""Length of a minute of the manifest."""
_STEP_MS, _ROWS, _TOKENS = 100, 10, 20
"""A worker answers 5 requests per second: 10 at a time, 2 s each."""
_LOADS = ((2.0, 6.0), (34.0, 40.0), (2.0, 30.0))
"""Requests per second, and for how many seconds."""
_IN_TIME_S = 8.0
"""A request is in time if its whole response arrives within this time, four times that of an idle service."""


@dataclass(slots=True)
class Workers:
    """The pods of the worker Deployment."""

    address: str
    running: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    leaving: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    _started: int = 0

    def scale(self, count: int) -> None:
        """Start or end workers."""
        while len(self.running) < count:
            self._started += 1
            command = [sys.executable, "-m", "tests.deploy.paced_worker", self.address, f"w{self._started}"]
            self.running.append(subprocess.Popen([*command, str(_STEP_MS), str(_ROWS)], cwd=ROOT))
        while len(self.running) > count:
            worker = self.running.pop()
            worker.terminate()
            self.leaving.append(worker)
        self.sizes.append(count)

    def kill(self) -> None:
        """End all at once."""
        for worker in self.running:
            worker.kill()


class Scaler:
    """The actions of KEDA and the HorizontalPodAutoscaler on a ScaledObject."""

    def __init__(self, spec: dict[str, Any], prometheus: str) -> None:
        self._least: int = spec["minReplicaCount"]
        self._most: int = spec["maxReplicaCount"]
        self._triggers = [dict(each, **each["metadata"]) for each in spec["triggers"]]
        self._behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        self._prometheus = prometheus
        self._wanted: list[tuple[float, int]] = []
        """Recommendations of the stabilization window."""
        self._sizes: list[tuple[float, int]] = []
        """Sizes of the last minute."""

    def decide(self, now: float, current: int) -> int:
        """Return the number of workers for now."""
        wanted = max(self._wanted_by(trigger, current) for trigger in self._triggers)
        wanted = min(max(wanted, self._least), self._most)
        window = self._behavior["scaleDown"]["stabilizationWindowSeconds"] / 60 * _MINUTE_S
        self._wanted = [(at, size) for at, size in self._wanted if at > now - window] + [(now, wanted)]
        self._sizes = [(at, size) for at, size in self._sizes if at > now - _MINUTE_S] + [(now, current)]
        if wanted > current:
            begin = min(size for _, size in self._sizes)
            return min(wanted, max(self._limits("scaleUp", begin)))
        wanted = min(current, max(size for _, size in self._wanted))
        begin = max(size for _, size in self._sizes)
        return max(wanted, begin - (max(self._limits("scaleDown", begin)) - begin))

    def _wanted_by(self, trigger: dict[str, Any], current: int) -> int:
        value = self._ask(trigger["query"])
        if value is None or math.isnan(value):
            return current
        ratio = value / float(trigger["threshold"])
        if trigger["metricType"] == "AverageValue":
            return math.ceil(ratio)
        return current if abs(ratio - 1) <= 0.1 else math.ceil(current * ratio)

    def _limits(self, direction: str, begin: int) -> list[int]:
        """Return the sizes that the policies allow within a minute that began with `begin`."""
        return [
            begin + (each["value"] if each["type"] == "Pods" else math.ceil(begin * each["value"] / 100))
            for each in self._behavior[direction]["policies"]
        ]

    def _ask(self, query: str) -> float | None:
        url = f"{self._prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=10) as answer:
            result = json.load(answer)["data"]["result"]
        return float(result[0]["value"][1]) if result else None


@needs_tools
@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")
@pytest.mark.parametrize(("rows", "requests", "wanted"), [(10, 80, 10), (10, 81, 11), (256, 205, 2), (256, 204, 1)])
def test_workers_are_wanted_by_the_part_of_their_rows_in_use(
    tmp_path: Path, rows: int, requests: int, wanted: int
) -> None:
    """The same threshold fits workers of any size, and another cell does not count.

    A lost worker's rows still count: without them there would be no answer while all workers are replaced.
    """
    (scaled,) = (each for each in of_kind("eight-gpus", "ScaledObject") if each["metadata"]["name"] == "a-quire-worker")
    trigger = scaled["spec"]["triggers"][0]
    wanted_range = (
        (wanted - 1) * float(trigger["metadata"]["threshold"]),
        wanted * float(trigger["metadata"]["threshold"]),
    )
    query = trigger["metadata"]["query"]
    given = [
        {"series": 'vllm:num_requests_running{cell="a"}', "values": f"{requests - 3}x20"},
        {"series": 'vllm:num_requests_waiting{cell="a"}', "values": "3x20"},
        {"series": 'quire_batch_row_limit{cell="a",worker="one"}', "values": f"{rows}x20"},
        {"series": 'quire_batch_row_limit{cell="a",worker="lost"}', "values": f"{rows}x8 stale"},
        {"series": 'vllm:num_requests_running{cell="b"}', "values": "999x20"},
        {"series": 'quire_batch_row_limit{cell="b",worker="one"}', "values": "1x20"},
    ]
    expression = f"({query}) > {wanted_range[0]} and ({query}) <= {wanted_range[1]}"
    sample = {"labels": "{}", "value": requests / rows}
    case = {"interval": "1m", "input_series": given,
            "promql_expr_test": [{"expr": expression, "eval_time": "18m", "exp_samples": [sample]}]}  # fmt: skip
    (tmp_path / "case.json").write_text(json.dumps({"rule_files": [], "tests": [case]}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(tmp_path / "case.json")], capture_output=True, text=True)

    assert trigger["metricType"] == "AverageValue", "the number of workers is the value divided by the threshold"
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.release
@needs_tools
@pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian package prometheus)")
def test_a_load_step_is_absorbed_and_nothing_is_lost(tmp_path: Path) -> None:
    """From 1 worker to 8 and back to 1: every request gets all its tokens, and 95 % are in time."""
    (scaled,) = (each for each in of_kind("eight-gpus", "ScaledObject") if each["metadata"]["name"] == "a-quire-worker")
    spec = json.loads(json.dumps(scaled["spec"])) | {"maxReplicaCount": 8}
    with _service(tmp_path) as (workers, grpc_port, prometheus):
        scaler = Scaler(spec, prometheus)
        done = asyncio.run(_drive(scaler, workers, grpc_port))
        codes = [worker.wait(30) for worker in workers.leaving]
    in_time = sum(1 for tokens, seconds in done if tokens == _TOKENS and seconds <= _IN_TIME_S)
    peak = max(workers.sizes)

    assert all(tokens == _TOKENS for tokens, _ in done), "tokens were lost"
    assert peak == 8
    assert workers.sizes[0] == workers.sizes[-1] == 1
    assert codes == [0] * len(codes)
    assert in_time >= 0.95 * len(done), f"{in_time} of {len(done)} in time"
    print(f"{len(done)} requests, {in_time} in time, sizes {workers.sizes}")


async def _drive(scaler: Scaler, workers: Workers, grpc_port: int) -> list[tuple[int, float]]:
    async with AsyncClient(f"127.0.0.1:{grpc_port}") as client:
        await _first_answer(client)
        scaling = asyncio.create_task(_scale(scaler, workers))
        requests: list[asyncio.Task[tuple[int, float]]] = []
        for rate, seconds in _LOADS:
            begin = time.monotonic()
            for number in range(int(rate * seconds)):
                await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
                requests.append(asyncio.create_task(_request(client, f"{len(requests)}")))
        done = await asyncio.gather(*requests)
        end = time.monotonic() + 60
        while len(workers.running) > 1 and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        scaling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await scaling
    return done


async def _first_answer(client: AsyncClient) -> None:
    end = time.monotonic() + 120
    while True:
        with contextlib.suppress(Exception):
            await client.generate("first", max_tokens=1, timeout=60).result()
            return
        assert time.monotonic() < end, "the service does not answer"
        await asyncio.sleep(0.2)


async def _request(client: AsyncClient, prompt: str) -> tuple[int, float]:
    began = time.monotonic()
    answer = await client.generate(prompt, max_tokens=_TOKENS, ignore_eos=True, timeout=120).result()
    return len(answer.token_ids), time.monotonic() - began


async def _scale(scaler: Scaler, workers: Workers) -> None:
    while True:
        now = time.monotonic()
        wanted = await asyncio.to_thread(scaler.decide, now, len(workers.running))
        if wanted != len(workers.running):
            workers.scale(wanted)
        await asyncio.sleep(_MINUTE_S / 4)


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[tuple[Workers, int, str]]:
    grpc_port, http_port, prometheus_port = free_ports(3)
    links = [f"--frontend-address=ipc://{folder}/f", f"--worker-address=ipc://{folder}/w"]
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
        "scrape_configs": [
            {
                "job_name": "quire",
                "static_configs": [{"targets": [f"127.0.0.1:{http_port}"], "labels": {"cell": "a"}}],
            }
        ],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))
    assert PROMETHEUS is not None
    commands = [
        [*QUIRE, "scheduler", *links, "--record-dir=off"],
        [*QUIRE, "frontend", links[0], f"--grpc-port={grpc_port}", f"--http-port={http_port}"],
        [
            PROMETHEUS, f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus_port}",
        ],
    ]  # fmt: skip
    workers = Workers(f"ipc://{folder}/w")
    with (folder / "log").open("wb") as log, contextlib.ExitStack() as ended:
        for command in commands:
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(folder)}
            )
            ended.callback(process.wait, 60)
            ended.callback(process.terminate)
        ended.callback(workers.kill)
        workers.scale(1)
        yield workers, grpc_port, f"http://127.0.0.1:{prometheus_port}"
