"""A real Prometheus scrapes a live service: every panel's query, vLLM's names and the exemplars return data."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from opentelemetry import trace

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import PATIENCE_S, Served, free_ports, serve
from quire import Client, SchedulingOptions, errors
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from shared import metric_names
from tools.alerts import RULES
from tools.dashboards import BOARDS, INTERVAL

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian package prometheus)")

VLLM_DASHBOARD = (
    'sum(rate(vllm:request_success_total{job=~"quire", model_name=~".+", instance=~".+"}[15s]))',
    'sum(rate(vllm:prompt_tokens_total{model_name=~".+"}[15s]))',
    'sum(rate(vllm:generation_tokens_total{model_name=~".+"}[15s]))',
    'histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket{model_name=~".+"}[15s])))',
    'histogram_quantile(0.95, sum by (le) (rate(vllm:inter_token_latency_seconds_bucket{model_name=~".+"}[15s])))',
    'histogram_quantile(0.95, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket{model_name=~".+"}[15s])))',
    'sum by (finished_reason) (rate(vllm:request_success_total{model_name=~".+"}[15s]))',
    'sum(rate(vllm:prefix_cache_hits_total{model_name=~".+"}[15s]))'
    ' / sum(rate(vllm:prefix_cache_queries_total{model_name=~".+"}[15s]))',
    'count(vllm:num_requests_running{model_name=~".+"})',
    'avg(vllm:kv_cache_usage_perc{model_name=~".+"})',
)
"""The forms in which vLLM's dashboards read its metrics."""


def _kill_worker(served: Served) -> None:
    os.kill(served.pid("worker"), signal.SIGKILL)


def _ask_too_much(served: Served) -> None:
    def generate(_: int) -> None:
        with contextlib.suppress(errors.QuireError), Client(served.grpc) as client:
            client.generate("the quick brown fox", max_tokens=200, ignore_eos=True).result()

    with ThreadPoolExecutor(12) as together:
        list(together.map(generate, range(12)))


def _fill_disk(served: Served) -> None:
    """Files of the scheduler can grow no further, as on a full disk."""
    psutil.Process(served.pid("scheduler")).rlimit(psutil.RLIMIT_FSIZE, (32 << 10, 32 << 10))
    _ask_too_much(served)


def _stall(served: Served) -> None:
    """The client reads one message, then nothing until its request ends for that reason.

    gRPC takes in 64 KiB for it, so the messages are large.
    """

    def ended() -> float:
        return served.metric("gen_ai_server_request_duration_seconds_count", error_type="STALLED_READER")

    before, end = ended(), time.monotonic() + PATIENCE_S
    with grpc.insecure_channel(served.grpc, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            v1.GenerateRequest(
                text="the quick brown fox",
                stop=v1.StopOptions(max_tokens=900, ignore_eos=True),
                output=v1.OutputOptions(logprobs=20),
            )
        )
        next(call)
        while ended() == before:
            assert time.monotonic() < end, f"no stalled reader after {PATIENCE_S} s"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, "Prometheus"]]:
    """A service that a few requests overload, and a Prometheus that scrapes it."""
    folder = tmp_path_factory.mktemp("troubled")
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
    flags = (
        "--num-threads=1", "--max-num-seqs=8", "--max-queued-requests=4", "--max-tokens-in-paged-kv-cache=1024",
        "--stall-timeout-s=0.5", "--stream-credit=4096", f"--record-dir={folder / 'record'}",
    )  # fmt: skip
    with serve(checkpoint, *flags) as served, Prometheus(folder, served.http) as prometheus:
        yield served, prometheus


@pytest.mark.every(3)
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("alerts", "fault"),
    [
        (("QuireNoWorker",), _kill_worker),
        (("QuireStalledReaders",), _stall),
        (("QuireOverloaded", "QuireKvCacheFull"), _ask_too_much),
        # This test comes last, because it leaves the scheduler unable to write.
        (("QuireRecordFailed",), _fill_disk),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_fault_fires_its_alerts(
    alerts: tuple[str, ...], fault: Callable[[Served], None], troubled: tuple[Served, "Prometheus"]
) -> None:
    """A real fault in a live service fires the alerts that name it, which did not fire before."""
    served, prometheus = troubled
    prometheus.wait_for_data("quire_workers > 0")
    expected = [f'ALERTS{{alertname="{alert}", alertstate="firing"}}' for alert in alerts]
    for firing in expected:
        assert prometheus.query(firing) == []
    fired = threading.Event()
    faults = threading.Thread(target=_repeat_until, args=(fired, lambda: fault(served)))
    faults.start()
    try:
        for firing in expected:
            prometheus.until(partial(prometheus.query, firing), firing)
    finally:
        fired.set()
        faults.join(PATIENCE_S)
    prometheus.wait_for_data("quire_workers > 0")


def _repeat_until(done: threading.Event, act: Callable[[], None]) -> None:
    act()
    while not done.wait(1.0):
        with contextlib.suppress(ValueError, ProcessLookupError):  # There is currently no worker to kill.
            act()


# This test follows the alert tests, because its load runs until the end of this module.
@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, "Prometheus"]]:
    """A loaded service that a Prometheus scrapes; every request is traced, but no collector receives the spans."""
    folder = tmp_path_factory.mktemp("prometheus")
    checkpoint = make_checkpoint("LlamaForCausalLM", folder / "model")
    # No process listens on this port, because an unavailable collector must not matter.
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}"}
    flags = ("--num-threads=1", f"--journal={folder / 'journal'}", f"--record-dir={folder / 'record'}")
    with serve(checkpoint, *flags, environ=environ) as served, _load(served), Prometheus(folder, served.http) as found:
        yield served, found


@pytest.mark.every(3)
@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_every_panel_shows_data(board: Any, loaded: tuple[Served, "Prometheus"]) -> None:
    """Each query of a dashboard returns numbers while the service is under load."""
    _, prometheus = loaded
    for panel in board.panels:
        for query in panel.queries:
            prometheus.wait_for_data(query.expr.replace(INTERVAL, "15s"))


def test_dashboards_for_vllm_show_data(loaded: tuple[Served, "Prometheus"]) -> None:
    """The expressions in vLLM's dashboards return data, and endpoint pickers find one series per metric."""
    _, prometheus = loaded
    for expr in VLLM_DASHBOARD:
        prometheus.wait_for_data(expr)
    for metric in metric_names.ALL:
        if metric.is_foreign:
            suffix = {"counter": "_total", "gauge": "", "histogram": "_count"}[metric.kind.value]
            found = prometheus.wait_for_data(f"{metric.name}{suffix}")
            assert all(each["metric"]["model_name"] for each in found)
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info"):
        assert len(prometheus.query(f"vllm:{name}")) == 1
    (config,) = prometheus.query("vllm:cache_config_info")
    assert int(config["metric"]["block_size"]) > 0
    assert int(config["metric"]["num_gpu_blocks"]) > 0


def test_prometheus_keeps_exemplars(loaded: tuple[Served, "Prometheus"]) -> None:
    """A bucket of the time to the first token leads to a trace."""
    _, prometheus = loaded
    query = "gen_ai_server_time_to_first_token_seconds_bucket"
    found = prometheus.until(lambda: prometheus.get("query_exemplars", query=query, start="0", end=str(time.time())))

    assert {len(each["labels"]["trace_id"]) for series in found for each in series["exemplars"]} == {32}


class Prometheus:
    """A Prometheus that scrapes a service every half second."""

    def __init__(self, folder: Path, target: str) -> None:
        self._folder = folder
        (self._port,) = free_ports(1)
        # Evaluate rules more often than in production, so that the test waits less.
        rules = re.sub(r"interval: \d+s", "interval: 1s", RULES.read_text("utf-8"))
        rules = re.sub(r"for: \d+[sm]", "for: 0s", rules)
        (folder / "rules.yaml").write_text(rules)
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [{"job_name": "quire", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def __enter__(self) -> "Prometheus":
        assert PROMETHEUS is not None
        self._process = subprocess.Popen(
            (
                PROMETHEUS,
                f"--config.file={self._folder / 'prometheus.json'}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self._port}",
                "--enable-feature=exemplar-storage",
            ),
            stdout=subprocess.DEVNULL,
            stderr=(self._folder / "prometheus.log").open("w"),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    def get(self, path: str, **parameters: str) -> Any:
        """Return an API call's data; None while Prometheus does not respond."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with self._opener.open(url, timeout=30) as response:
                return json.load(response)["data"]
        except ConnectionError:
            return None
        except urllib.error.HTTPError as error:
            if error.code == 503:  # The server is still starting.
                return None
            pytest.fail(f"{parameters}: {error.read().decode()}")
        except urllib.error.URLError:
            return None

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        data = self.get("query", query=expr)
        return [] if data is None else list(data["result"])

    def wait_for_data(self, expr: str) -> list[dict[str, Any]]:
        """Return the series of a query as soon as one has a number."""

        def with_number() -> list[dict[str, Any]]:
            return [each for each in self.query(expr) if not math.isnan(float(each["value"][1]))]

        found: list[dict[str, Any]] = self.until(with_number, expr)
        return found

    def until(self, read: Callable[[], Any], what: str = "") -> Any:
        """Return what `read` returns as soon as it is not empty."""
        end = time.monotonic() + PATIENCE_S
        while not (found := read()):
            assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
            assert time.monotonic() < end, f"no data after {PATIENCE_S} s: {what}"
            time.sleep(0.2)
        return found


@contextlib.contextmanager
def _load(served: Served) -> Iterator[None]:
    """Requests of all kinds in the background: streams, targets, tenants, HTTP, and some that fail."""
    stopping = threading.Event()

    def run() -> None:
        parent = trace.NonRecordingSpan(
            trace.SpanContext(trace_id=77, span_id=9, is_remote=False, trace_flags=trace.TraceFlags(1))
        )
        number = 0
        with Client(served.grpc) as client, trace.use_span(parent):
            while not stopping.is_set():
                number += 1
                scheduling = SchedulingOptions(
                    tenant=f"team-{number % 3}", ttft_target_s=(5.0, 1e-6)[number % 2], total_time_target_s=60.0
                )
                prompt = "the quick brown fox jumps over the lazy dog " * 4 + str(number % 5)
                for _ in client.generate(prompt, max_tokens=12, ignore_eos=True, scheduling=scheduling):
                    pass
                # The client disconnects after the first token.
                with client.generate(prompt, max_tokens=100, ignore_eos=True) as left:
                    next(iter(left))
                _post(served)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(PATIENCE_S)


def _post(served: Served) -> None:
    body = json.dumps({"prompt": "the fox", "max_tokens": 3}).encode()
    request = urllib.request.Request(
        f"http://{served.http}/v1/completions", body, {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        response.read()
