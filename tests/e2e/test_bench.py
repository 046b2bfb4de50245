"""`quire bench serve` against a real service: both protocols, its counts beside those of the server."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from measure.testbed.service import ROOT, Served
from tests.e2e.test_commands import quire

COUNTED = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "quire_requests_ended_total")
LOADS = {
    "open loop over gRPC": ("--rate=20", "--requests=20", "--input=8-40"),
    "closed loop over gRPC, sessions": ("--concurrency=3", "--requests=6", "--turns=2", "--input=8-20"),
    "open loop over HTTP, text": ("--rate=20", "--constant", "--requests=12", "--input=20"),
    "closed loop over HTTP, token ids": ("--concurrency=3", "--requests=12", "--prompts=tokens", "--input=8-40"),
    "two processes over gRPC": ("--rate=20", "--requests=12", "--input=8", "--processes=2", "--metrics={http}"),
}


def _bench(served: Served, file: Path, *flags: str, http: bool = False) -> dict[str, Any]:
    server = f"--url=http://{served.http}" if http else f"--target={served.grpc}"
    given = [flag.format(http=served.http) for flag in flags]
    quire("bench", "serve", server, "--output=4-12", *given, f"--json={file}")
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.drawn(2)
@pytest.mark.parametrize("load", LOADS)
def test_counts_are_those_of_the_server(demo: Served, tmp_path: Path, load: str) -> None:
    """The report's numbers of requests, prompt tokens and output tokens equal the server's counts."""
    http = "HTTP" in load
    before = [demo.metric(name) for name in COUNTED]
    report = _bench(demo, tmp_path / "report.json", *LOADS[load], http=http)
    demo.wait_until_empty()
    prompt, output, ended = (demo.metric(name) - was for name, was in zip(COUNTED, before, strict=True))
    # Over HTTP, the tool first sends probes, which ask for one token each. Two probes contain text.
    probes = 2 if "text" in load else 1 if http else 0

    assert report["failed"] == 0
    assert report["answered"] == report["requests"] == ended - probes
    assert report["out_tokens"] == output - probes
    assert probes or report["prompt_tokens"] == prompt
    assert set(report["ttft_s"]) >= {"mean", "p50", "p90", "p95", "p99", "p99.9", "max"}
    assert report["ttft_s"]["count"] == report["requests"]
    assert report["generator_late_s"]["count"] == report["requests"]
    if "--metrics={http}" in LOADS[load] or http:
        assert report["repeats"][0]["server"]["generation_tokens"] == report["out_tokens"]


def test_texts_have_about_the_length_asked_for(demo: Served, tmp_path: Path) -> None:
    """The number of words is scaled by the server's token counts; the mean is within a tenth of 300 tokens."""
    report = _bench(demo, tmp_path / "r.json", "--concurrency=2", "--requests=6", "--input=300", http=True)

    assert report["prompt_tokens"] / report["requests"] == pytest.approx(300, rel=0.1)


@pytest.mark.every(3)
def test_cancelled_requests_end_on_the_server(demo: Served, tmp_path: Path) -> None:
    """As many as the report says, and nothing of them is left.

    On a busy machine, a server may be far ahead of its client, and a complete request can no longer be cancelled. With
    this seed, each of the three cancellations therefore falls into the first tenth of the 1,500 tokens.
    """
    before = demo.metric("quire_requests_ended_total", reason="cancelled")
    flags = ("--concurrency=3", "--requests=6", "--input=8", "--output=1500", "--cancel-ratio=0.5", "--seed=884")
    report = _bench(demo, tmp_path / "r.json", *flags)
    demo.wait_until_empty()

    assert report["cancelled"] == demo.metric("quire_requests_ended_total", reason="cancelled") - before == 3
    assert report["failed"] == 0


def test_a_deadline_is_a_failure_with_its_reason(demo: Served, tmp_path: Path) -> None:
    """1,500 tokens do not fit into 0.2 s."""
    flags = ("--concurrency=2", "--requests=2", "--deadline=0.2", "--slo=ttft_ms=60000")
    server = f"--target={demo.grpc}"
    file = tmp_path / "r.json"
    with pytest.raises(AssertionError, match="assert"):  # No request got a response, so the exit code is 1.
        quire("bench", "serve", server, *flags, "--output=1500", f"--json={file}")
    report = json.loads(file.read_text())

    assert (report["failures"], report["goodput"]) == ({"DEADLINE": 2}, 0.0)
    assert "no request got a response; latencies are unknown" in report["warnings"]


def test_repeats_give_intervals(demo: Served, tmp_path: Path) -> None:
    """With two repeats and different seeds, each mean lies within its interval."""
    report = _bench(demo, tmp_path / "r.json", "--concurrency=2", "--requests=4", "--repeats=2", "--slo=e2e_ms=60000")

    assert [each["seed"] for each in report["repeats"]] == [0, 1]
    assert report["requests"] == 8
    assert report["goodput_share"] == 1.0
    assert all(each["low"] <= each["mean"] <= each["high"] for each in report["intervals"].values())


def test_a_sweep_measures_growing_loads(demo: Served, tmp_path: Path) -> None:
    """Two loads in a closed loop each have their requests, and the higher one stays within the limit."""
    file = tmp_path / "sweep.json"
    flags = ("--users", "--loads=1,2", "--duration=1", "--warmup=0", "--max-repeats=1", "--slo=e2e_ms=60000")
    table = quire("bench", "sweep", f"--target={demo.grpc}", *flags, "--output=4", f"--json={file}")
    report = json.loads(file.read_text())

    assert [each["load"] for each in report["results"]] == [1, 2]
    assert all(each["kept"] and each["requests"] > 0 and not each["failed"] for each in report["results"])
    assert report["highest_kept"] == 2
    assert "up to 2 users, at least 95% of the requests keep e2e ≤ 60000 ms" in table


@pytest.mark.every(3)
def test_the_record_gives_the_figures_of_the_run_alone(demo: Served, tmp_path: Path) -> None:
    """Steps, occupancy, prefix hits and idle time of the device; requests before the run do not count."""
    record = demo.log.parent / "quire" / "record" / "any"
    _bench(demo, tmp_path / "before.json", "--concurrency=2", "--requests=6")
    before = demo.metric("quire_steps_total")
    flags = ("--concurrency=2", "--requests=8", "--input=16", "--seed=7", f"--record={record}")
    report = _bench(demo, tmp_path / "r.json", *flags)
    steps = demo.metric("quire_steps_total") - before
    (server,) = (repeat["server"] for repeat in report["repeats"])

    # Only the metric counts plans that add no row and compute nothing.
    assert 0 < server["steps"] <= steps
    assert 1 <= server["rows_per_step"] <= 2
    assert 0 <= server["device_idle_share"] < 1
    assert (server["preemptions"], server["prefix_hit_share"]) == (0, 0.0)


@pytest.mark.release
def test_an_over_saturated_service_ends_the_arrivals(demo: Served, tmp_path: Path) -> None:
    """400 requests per second with 128 tokens each exceed the capacity of two cores; the report says so in words."""
    flags = ("--rate=400", "--duration=600", "--input=64", "--output=128", "--drain=1")
    file = tmp_path / "r.json"
    quire("bench", "serve", f"--target={demo.grpc}", *flags, f"--json={file}")
    report = json.loads(file.read_text())

    assert report["repeats"][0]["saturated_at_s"] < 120
    assert any("over-saturated: stopped after" in each for each in report["warnings"])


class _Page(HTMLParser):
    """Collects tags and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "rect", "line", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_self_contained(demo: Served, tmp_path: Path) -> None:
    """Charts of latencies, throughput and requests; no script, and nothing is loaded from elsewhere."""
    file = tmp_path / "report.html"
    flags = ("--concurrency=4", "--requests=12", "--output=8", f"--html={file}", f"--metrics={demo.http}")
    table = quire("bench", "serve", f"--target={demo.grpc}", *flags)
    page = _Page()
    page.feed(text := file.read_text())

    assert page.open == []
    assert page.tags.count("svg") == 7
    assert "script" not in page.tags
    assert set(re.findall(r"https?://[^\"']*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href|url\()", text)
    assert "12 answered, 0 failed, 0 cancelled" in table
    assert "sequences per step" in table


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")


def _shown(file: Path, profile: Path) -> str:
    """Return the document as rendered by headless Chromium; nothing may be written to its console."""
    arguments = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    arguments += ["--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    browser = subprocess.run([*arguments, file.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in browser.stderr
    return browser.stdout


@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
def test_a_browser_shows_the_pages_without_errors(demo: Served, tmp_path: Path) -> None:
    """Headless Chromium lays out every chart of the three reports."""
    serve, sweep, strategies = (tmp_path / name for name in ("serve.html", "sweep.html", "strategies.html"))
    target = f"--target={demo.grpc}"
    quire("bench", "serve", target, "--concurrency=2", "--requests=4", "--output=4", f"--html={serve}")
    flags = ("--users", "--loads=1,2", "--duration=0.5", "--warmup=0", "--max-repeats=1", "--output=4")
    quire("bench", "sweep", target, *flags, f"--html={sweep}")
    results = ROOT / "measure" / "results" / "strategies.json"
    quire("bench", "strategies", f"--from={results}", f"--html={strategies}")

    shown = {file: _shown(file, tmp_path / "profile") for file in (serve, sweep, strategies)}
    assert {file.stem: text.count("<svg") for file, text in shown.items()} == {"serve": 7, "sweep": 6, "strategies": 11}
    assert all(text.count("<circle") > 0 for file, text in shown.items() if file is not serve)
