"""Executes a plan in this process or in several; watches the progress and the server's metrics."""

import asyncio
import http.client
import math
import multiprocessing
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import uvloop

from measure.load.arrivals import Users
from measure.load.figures import Figures, Sample, Slo, is_saturated
from measure.load.generator import Generated, generate, get_ready, open_target
from measure.load.outcomes import Outcome
from measure.load.plan import ANSWERED, BEGUN, ENDED, FAILED, TOKENS, Counters, Plan, Share
from measure.load.recorded import FLUSH_S, run_in_record
from measure.load.server import ServerFigures, gauges_of
from measure.spread import Spread
from quire_server.http_client import Server
from quire_server.scrape import parse

_LOOK_EVERY_S = 0.5
"""Interval of progress reports, samples and scrapes, in seconds."""
_SCRAPE_TIMEOUT_S = 5.0
_BEGIN_S = 0.02
"""Time from all processes being ready to the beginning of the run, in seconds."""
_MEMORY = 100_000
"""Maximum number of samples and scrapes that are retained."""
LATE_S = 0.001
"""The generator was the bottleneck if its 99th percentile delay exceeds this and a twentieth of the median TTFT."""


class GeneratorError(Exception):
    """A generating process exited without a result."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run at one time."""

    time_s: float
    begun: int
    in_flight: int
    ended: int
    failed: int
    tokens: int
    tokens_per_s: float
    """Token rate during the last interval."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    """Outcomes in the order of their intended starts."""
    figures: Figures
    loop_late: Spread
    """Event loop delays in the generator."""
    shortened: int
    """Turns that were truncated or skipped because they exceed the model's context."""
    cpu_s: float
    """CPU time that the generator used."""
    processes: int
    saturated_at_s: float | None
    """Time at which the arrivals stopped early because the server was over-saturated."""
    server: ServerFigures | None
    held_back: int = 0
    """Sessions that waited because `max_in_flight` sessions were open."""

    @property
    def bottleneck(self) -> str:
        """Why the generator limited the results, not the server; empty if it did not."""
        limit_s = max(LATE_S, self.figures.ttft.p50 / 20)
        if self.figures.late.p99 > limit_s and not self.held_back:
            return f"requests were sent {1000 * self.figures.late.p99:.1f} ms late (p99)"
        if self.loop_late.p99 > limit_s:
            return f"tokens were noted {1000 * self.loop_late.p99:.1f} ms late (p99)"
        return ""


async def run_plan(
    plan: Plan,
    slo: Slo,
    *,
    token: str = "",
    processes: int = 1,
    metrics: Server | None = None,
    record: Path | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Run:
    """Execute a plan.

    Args:
        plan: the run.
        slo: limits of good requests.
        token: bearer token.
        processes: number of generating processes; 1 means this process.
        metrics: server to scrape `/metrics` from; None omits them.
        record: the server's flight record folder; None omits its data.
        watch: called with the progress twice per second.

    Raises:
        GeneratorError: a process failed.
        OSError: the CA file or the record cannot be read.
        UnreadableRecordError: the record is not one, or of a newer version.
    """
    size = Counters.size(processes)
    values: Any = array("q", [0] * size) if processes == 1 else multiprocessing.RawArray("q", size)
    counters = Counters(values, Share())
    before = await asyncio.to_thread(_metrics_page, metrics) if metrics else None
    scraped_at = time.perf_counter()
    watcher = _Watcher(plan, counters, metrics if before is not None else None, watch)
    if processes == 1:
        parts = [await _in_this_process(plan, token, counters, watcher)]
    else:
        parts = await _in_processes(plan, token, processes, values, watcher)
    after = await asyncio.to_thread(_metrics_page, metrics) if metrics and before is not None else None
    server = None
    if before is not None and after is not None:
        between_s = time.perf_counter() - scraped_at
        server = ServerFigures.of(parse(before), parse(after), [parse(page) for page in watcher.pages], between_s)
    outcomes = sorted((each for part in parts for each in part.outcomes), key=lambda each: each.intended_s)
    if record is not None and outcomes:
        await asyncio.sleep(FLUSH_S)
        counted = [each for each in outcomes if each.counted] or outcomes
        begin, end = (watcher.began_unix_s + at for at in (counted[0].intended_s, max(e.ended_s for e in counted)))
        server = ServerFigures.with_record(server, await asyncio.to_thread(run_in_record, record, begin, end))
    return Run(
        plan=plan,
        outcomes=tuple(outcomes),
        figures=Figures.of(outcomes, slo),
        loop_late=Spread.of(value for part in parts for value in part.loop_late_s),
        shortened=sum(part.shortened for part in parts),
        cpu_s=sum(part.cpu_s for part in parts),
        processes=processes,
        saturated_at_s=watcher.saturated_at_s,
        server=server,
        held_back=sum(part.held_back for part in parts),
    )


class _Watcher:
    """Watches a run twice per second: progress, saturation, and the server's gauges."""

    def __init__(
        self,
        plan: Plan,
        counters: Counters,
        metrics: Server | None,
        watch: Callable[[Progress], None],
    ) -> None:
        self.saturated_at_s: float | None = None
        self.began_unix_s = 0.0
        """Wall clock time at which the run began."""
        self.pages: list[str] = []
        """The server's gauges as text, because parsing would delay the generator."""
        self._plan, self._counters, self._metrics, self._watch = plan, counters, metrics, watch
        self._samples: list[Sample] = []

    async def run(self, start: float) -> None:
        """Watch the run that begins at `start`, until cancelled."""
        tokens, last_s = 0, 0.0
        self.began_unix_s = time.time() - (time.perf_counter() - start)
        await asyncio.sleep(max(start - time.perf_counter(), 0.0))
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = time.perf_counter() - start
            begun, answered, ended, failed, total = (
                self._counters.total(kind) for kind in (BEGUN, ANSWERED, ENDED, FAILED, TOKENS)
            )
            self._watch(
                Progress(now_s, begun, begun - ended, ended, failed, total, (total - tokens) / (now_s - last_s))
            )
            tokens, last_s = total, now_s
            self._samples.append(Sample(now_s, begun, answered))
            self._stop_if_saturated(now_s)
            if self._metrics is not None and len(self.pages) < _MEMORY:
                page = await asyncio.to_thread(_metrics_page, self._metrics)
                self.pages += [gauges_of(page)] if page is not None else []

    def _stop_if_saturated(self, now_s: float) -> None:
        if self.saturated_at_s is not None or not self._plan.stops_early or isinstance(self._plan.arrivals, Users):
            return
        is_over = self._plan.end_s is not None and now_s >= self._plan.end_s
        if self._counters.is_stopped or (not is_over and is_saturated(self._samples)):
            self.saturated_at_s = now_s
            self._counters.stop()


async def _in_this_process(plan: Plan, token: str, counters: Counters, watcher: _Watcher) -> Generated:
    target = open_target(plan.address, token)
    try:
        await get_ready(target)
        start = time.perf_counter() + _BEGIN_S
        watching = asyncio.create_task(watcher.run(start))
        try:
            return await generate(plan, Share(), target, counters, start)
        finally:
            await _end(watching)
    finally:
        await target.close()


async def _in_processes(plan: Plan, token: str, processes: int, values: Any, watcher: _Watcher) -> list[Generated]:
    context = multiprocessing.get_context("spawn")
    children: list[tuple[SpawnProcess, Connection[Any, Any]]] = []
    try:
        for number in range(processes):
            ours, theirs = context.Pipe()
            share = Share(number, processes)
            child = context.Process(target=_child, args=(plan, token, share, values, theirs), daemon=True)
            child.start()
            theirs.close()
            children.append((child, ours))
        for _, pipe in children:
            await asyncio.to_thread(_receive, pipe)  # Wait until the child is ready.
        start = time.perf_counter() + _BEGIN_S
        for _, pipe in children:
            pipe.send(start)
        watching = asyncio.create_task(watcher.run(start))
        try:
            return [await asyncio.to_thread(_receive, pipe) for _, pipe in children]
        finally:
            await _end(watching)
    finally:
        for child, pipe in children:
            if child.is_alive():
                child.terminate()
            child.join()
            pipe.close()


async def _end(watching: "asyncio.Task[None]") -> None:
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def _receive(pipe: "Connection[Any, Any]") -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise GeneratorError("a generating process ended without a result; see its error above") from None


def _child(plan: Plan, token: str, share: Share, values: Any, pipe: "Connection[Any, Any]") -> None:
    """Generate one share in a child process. The pipe says when to begin."""

    async def work() -> Generated:
        target = open_target(plan.address, token)
        try:
            await get_ready(target)
            pipe.send(None)
            return await generate(plan, share, target, Counters(values, share), pipe.recv())
        finally:
            await target.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        pipe.send(runner.run(work()))
    pipe.close()


def _metrics_page(server: Server) -> str | None:
    """Return a server's metrics page; None if there is none."""
    connection = server.connect(_SCRAPE_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={**server.headers, "accept": "text/plain"})
        response = connection.getresponse()
        body = response.read()
        return body.decode() if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def token_rates(outcomes: Sequence[Outcome], buckets: int = 120) -> list[tuple[float, float]]:
    """Return output tokens per second over the time of a run, as points for a chart."""
    end_s = max((each.ended_s for each in outcomes), default=0.0)
    if end_s <= 0:
        return []
    width_s = max(end_s / buckets, 0.1)
    counts = [0.0] * (math.ceil(end_s / width_s) + 1)
    for each in outcomes:
        messages = len(each.message_times_s)
        for time_s in each.message_times_s:
            counts[min(max(int(time_s / width_s), 0), len(counts) - 1)] += each.output_tokens / messages
    return [((number + 0.5) * width_s, count / width_s) for number, count in enumerate(counts[:-1])]
