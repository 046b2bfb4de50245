"""Time between a worker and its next plan: the real scheduler process over ZeroMQ, with echo workers.

There are three processes: the scheduler as started by `quire scheduler`, one process of echo workers (`echo_worker`)
with a given step time, and this process as the front end (`token_sink`). All rows of all workers decode. In a case with
a burst, some rows stay free until the measurement starts; then requests for all of them arrive at once.

The benchmark measures steps per second, the fraction of time that workers wait for a plan, and the duration of turns of
the scheduler's loop. The rounds of all cases are interleaved, so that other programs affect all cases alike. Linux
only.
"""

import contextlib
import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import zmq

from measure.scheduler import echo_worker
from measure.scheduler.echo_worker import EchoReport
from measure.scheduler.token_sink import SinkError, TokenSink
from shared.config import SchedulerConfig, to_flags

PROMPT_TOKENS = 2 * echo_worker.BLOCK_SIZE
SETUP_S = 40.0
"""Timeout of the set-up, until every row is in decode."""
_NAP_S = 0.002
"""Interval at which the front end polls its socket."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LinkBenchError(Exception):
    """A run failed; the message is one line."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """Case to measure: workers, rows per worker, step time in ms, plans in flight, requests in the burst.

    With `journal`, all requests are resumable and the scheduler has a journal. With `standby`, a standby mirrors it.
    """

    workers: int
    rows: int
    step_ms: float
    in_flight: int
    burst: int = 0
    journal: bool = False
    standby: bool = False


BURST = 2_000
DEFAULT_CASES = (
    Case(workers=1, rows=256, step_ms=5.0, in_flight=1),
    Case(workers=1, rows=256, step_ms=5.0, in_flight=2),
    Case(workers=1, rows=256, step_ms=1.0, in_flight=1),
    Case(workers=1, rows=256, step_ms=1.0, in_flight=2),
    Case(workers=64, rows=256, step_ms=20.0, in_flight=2),
    Case(workers=64, rows=64, step_ms=20.0, in_flight=2),
    Case(workers=64, rows=64, step_ms=20.0, in_flight=2, burst=BURST),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of one case."""

    report: EchoReport
    tokens_per_s: float
    """Tokens that the front end received, per second."""
    scheduler_cpu_s: float
    """CPU time of all scheduler threads during the measurement."""
    longest_turn_s: float
    """Longest turn of the scheduler's loop, as its histogram bucket's upper bound."""
    parts: dict[str, "PartOfTurns"]
    """Parts of the turns by name."""
    thread_cpu_s: dict[str, float]
    """CPU time by thread: loop, ZeroMQ, other (of which nearly all is the flight recorder)."""


@dataclass(frozen=True, slots=True)
class PartOfTurns:
    """Time of one part of the turns of the scheduler's loop, including time without a core."""

    total_s: float
    longest_s: float
    """Upper bound of the longest time in one turn."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """Medians over the rounds of one case. `worker_wait_share` is relative to the total time of all workers."""

    workers: int
    rows: int
    step_ms: float
    in_flight: int
    rounds: int
    steps_per_s: float
    """Steps of all workers, per second."""
    worker_wait_share: float
    worker_wait_share_min: float
    worker_wait_share_max: float
    worst_worker_wait_share: float
    """Wait share of the worker that waited longest."""
    wait_us_p50: float
    wait_us_p99: float
    late_us_p50: float
    """Median delay from the end of a step to sending its result, in the echo worker."""
    tokens_per_s: float
    scheduler_cpu_us_per_step: float
    scheduler_cpu_share: float
    """CPU time of the scheduler process, as a fraction of one core."""
    burst: int
    """Requests that arrived at once at the start of the measurement."""
    rows_at_end: int
    """Rows in decode at the end, in the round with the fewest. Below the total if the time was too short."""
    longest_turn_ms: float
    """Upper bound for the longest turn of the scheduler's loop in any round, including time without a core."""
    worst_worker: str
    """Name of the worker that waited longest in the last round."""
    thread_cpu_us_per_step: dict[str, float]
    """CPU time of the scheduler process per step, by thread."""
    journal: bool
    standby: bool
    part_us_per_step: dict[str, float]
    """Time per step in each part of a turn."""
    longest_part_ms: dict[str, float]
    """Upper bound of the longest time of each part in one turn, in any round."""


def cases_for(
    *,
    workers: int | None = None,
    rows: int | None = None,
    step_ms: float | None = None,
    burst: int | None = None,
    standby: bool = False,
) -> tuple[Case, ...]:
    """Return the default cases, or those for the given options, with one and two plans in flight.

    With `standby`, there are two plans in flight, without a journal, with one, and with a standby.
    """
    if standby:
        case = Case(workers or 1, rows or 256, step_ms or (20.0 if workers else 5.0), 2, burst or 0)
        return case, replace(case, journal=True), replace(case, journal=True, standby=True)
    if workers is rows is step_ms is burst is None:
        return DEFAULT_CASES
    workers = workers or 1
    steps = (step_ms,) if step_ms is not None else (5.0, 1.0) if workers == 1 else (20.0,)
    return tuple(Case(workers, rows or 256, step, in_flight, burst or 0) for step in steps for in_flight in (1, 2))


def run_rounds(
    cases: Sequence[Case],
    *,
    rounds: int,
    seconds: float,
    folder: Path,
    environment: Mapping[str, str],
    progress: Callable[[str], None] = lambda line: None,
) -> list[LinkResult]:
    """Measure every case `rounds` times.

    Args:
        cases: the cases.
        rounds: measurements per case.
        seconds: duration of a measurement, without set-up.
        folder: folder for sockets and the scheduler's log; its path must be short enough for a Unix socket.
        environment: environment for the child processes; names this process as their supervisor.
        progress: called with a description of each measurement before it starts.

    Raises:
        LinkBenchError: a run failed.
    """
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    for number in range(1, rounds + 1):
        for case in cases:
            progress(f"round {number} of {rounds}: {case}")
            runs[case].append(measure(case, seconds, folder, environment))
    return [_result(case, repeated) for case, repeated in runs.items()]


def measure(case: Case, seconds: float, folder: Path, environment: Mapping[str, str]) -> Run:
    """Run one measurement.

    Raises:
        LinkBenchError: the run failed.
    """
    num_rows = case.workers * case.rows
    if case.burst >= num_rows:
        raise LinkBenchError(
            f"--burst: {case.burst} requests need more than {num_rows} rows; raise --workers or --rows"
        )
    # Allow more steps than can run, so that no request ends during the measurement.
    max_tokens = 1000 + int(1000 * (SETUP_S + echo_worker.WARM_UP_S + seconds) / case.step_ms)
    max_model_len = PROMPT_TOKENS + max_tokens
    # Tokens per request while all rows decode, for the measurement and a margin for a slow set-up.
    expected_len = PROMPT_TOKENS + int(1000 * (15 + 2 * seconds) / case.step_ms)
    config = SchedulerConfig(
        frontend_address=f"ipc://{folder}/frontends",
        worker_address=f"ipc://{folder}/workers",
        max_num_seqs=case.rows,
        max_num_batched_tokens=case.rows * PROMPT_TOKENS,
        max_queued_requests=2 * num_rows,  # Twice the rows, because one tenant may not fill the whole queue.
        max_plans_in_flight=case.in_flight,
    )
    if case.journal:
        config = replace(config, journal=f"{folder}/journal", journal_bytes=1 << 30, resume_keep_bytes=1 << 30)
    if case.standby:
        config = replace(config, standby_address=f"ipc://{folder}/standbys")
    echo_flags = {
        "address": config.worker_address,
        "workers": case.workers,
        "rows": case.rows,
        "begin-rows": num_rows - case.burst,
        "step-ms": case.step_ms,
        "max-model-len": max_model_len,
        "num-blocks": case.rows * (expected_len // echo_worker.BLOCK_SIZE + 1),
        "max-tokens-per-step": config.max_num_batched_tokens,
        "seconds": seconds,
        "give-up-s": SETUP_S,
    }
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, f"{folder}/journal", ignore_errors=True)
        scheduler = stack.enter_context(
            _Process(["quire_server.cli.main", "scheduler", *to_flags(config)], folder / "scheduler.log", environment)
        )
        if case.standby:
            stack.enter_context(_standby(config, folder, environment))
        echo = stack.enter_context(
            _Process(
                ["measure.scheduler.echo_worker", *(f"--{name}={value}" for name, value in echo_flags.items())],
                folder / "echo.log",
                environment,
            )
        )
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        sink = TokenSink(context, config.frontend_address)
        stack.callback(sink.close)
        stand = _Stand(scheduler, echo, sink, time.monotonic() + 2 * SETUP_S + seconds)
        stand.expect("joined")
        submit = partial(
            sink.submit,
            max_tokens=max_tokens,
            prompt_tokens=PROMPT_TOKENS,
            block_size=echo_worker.BLOCK_SIZE,
            fingerprint=echo_worker.FINGERPRINT,
            is_resumable=case.journal,
            vocab_size=echo_worker.VOCAB,
        )
        submit(num_rows - case.burst)
        stand.expect("measuring")
        # Read these first: a busy scheduler takes a while to compute its metrics.
        cpu_s, threads, tokens = scheduler.cpu_seconds(), scheduler.thread_cpu_seconds(), sink.num_tokens
        sink.ask_for_metrics()
        submit(case.burst)
        turns_before = stand.turns()
        report = EchoReport(**json.loads(stand.line()))
        scheduler_cpu_s, tokens = scheduler.cpu_seconds() - cpu_s, sink.num_tokens - tokens
        thread_cpu_s = {name: s - threads[name] for name, s in scheduler.thread_cpu_seconds().items()}
        sink.ask_for_metrics()
        turns = stand.turns()
        return Run(
            report=report,
            tokens_per_s=tokens / report.elapsed_s,
            scheduler_cpu_s=scheduler_cpu_s,
            longest_turn_s=longest_turn(turns_before[""].buckets, turns[""].buckets),
            parts={name: _part(turns_before.get(name, _NO_TURNS), turns[name]) for name in turns if name},
            thread_cpu_s=thread_cpu_s,
        )


@contextlib.contextmanager
def _standby(config: SchedulerConfig, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a standby of the scheduler with this configuration, which has the whole journal from now on."""
    mirror, log = folder / "mirror", folder / "standby.log"
    own = replace(config, journal=str(mirror), standby_address="", standby_of=config.standby_address)
    try:
        with _Process(["quire_server.cli.main", "scheduler", *to_flags(own)], log, environment) as process:
            end = time.monotonic() + SETUP_S
            while "has the whole journal" not in log.read_text():
                process.check()
                if time.monotonic() > end:
                    raise LinkBenchError("timeout: the standby does not have the whole journal")
                time.sleep(_NAP_S)
            yield
    finally:
        shutil.rmtree(mirror, ignore_errors=True)


def longest_turn(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return the upper bound of the last bucket with new turns; the arguments are cumulative histograms."""
    total = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    return min((bound for bound in total if total[bound] >= max(total.values())), default=0.0)


@dataclass(frozen=True, slots=True)
class _Times:
    """A cumulative histogram: buckets by upper bound in seconds, and the sum in seconds."""

    buckets: dict[float, float]
    sum_s: float


_NO_TURNS = _Times({}, 0.0)


def _part(before: _Times, after: _Times) -> PartOfTurns:
    return PartOfTurns(after.sum_s - before.sum_s, longest_turn(before.buckets, after.buckets))


class _Process:
    """A child process that exits with this one, through its lifeline or because its standard input is closed."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._name, self._log = command[0], log
        with log.open("wb") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                # `select` does not report a line that this process has already buffered.
                bufsize=0,
            )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.terminate()
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def has_line(self, timeout_s: float) -> bool:
        """Wait for a line or the end of output; return whether there is a line."""
        assert self._child.stdout is not None
        return bool(select.select([self._child.stdout], [], [], timeout_s)[0])

    def line(self) -> str:
        """Return the next line of output.

        Raises:
            LinkBenchError: the process has ended.
        """
        assert self._child.stdout is not None
        line: bytes = self._child.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1)
            raise self._ended()
        return line.decode().strip()

    def check(self) -> None:
        """Check that the process is running.

        Raises:
            LinkBenchError: the process has ended.
        """
        if self._child.poll() is not None:
            raise self._ended()

    def _ended(self) -> LinkBenchError:
        last_words = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        return LinkBenchError(f"{self._name} ended with status {self._child.poll()}: {last_words}")

    def cpu_seconds(self) -> float:
        """Return the CPU time of all threads so far, in seconds."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def thread_cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time so far, in seconds, by thread: loop, ZeroMQ, other."""
        found = {"loop": 0.0, "ZeroMQ": 0.0, "other": 0.0}
        for task in Path(f"/proc/{self._child.pid}/task").iterdir():
            try:
                name, spent = (task / "comm").read_text(), (task / "schedstat").read_text()
            except OSError:  # The thread has ended.
                continue
            kind = "loop" if int(task.name) == self._child.pid else "ZeroMQ" if name.startswith("ZMQ") else "other"
            found[kind] += int(spent.split()[0]) / 1e9
        return found


@dataclass(frozen=True, slots=True)
class _Stand:
    """Processes and front end for one measurement. Waits end at `give_up`."""

    scheduler: _Process
    echo: _Process
    sink: TokenSink
    give_up: float

    def line(self) -> str:
        """Return the next line from the echo workers; drain tokens while waiting."""
        while not self.echo.has_line(_NAP_S):
            self._drain("output from the echo workers")
        return self.echo.line()

    def turns(self) -> dict[str, _Times]:
        """Return the histograms of the loop's turns ("") and of their parts, from the scheduler's metrics.

        Raises:
            LinkBenchError: the scheduler does not respond.
        """
        while (snapshot := self.sink.metrics) is None:
            self._drain("metrics from the scheduler")
            time.sleep(_NAP_S)
        buckets: dict[str, dict[float, float]] = {}
        sums: dict[str, float] = {}
        for family in snapshot.families:
            if family.name not in ("quire_scheduler_turn_seconds", "quire_scheduler_turn_part_seconds"):
                continue
            for sample in family.samples:
                part = sample.labels.get("part", "")
                if "le" in sample.labels:
                    buckets.setdefault(part, {})[float(sample.labels["le"])] = sample.value
                elif sample.name.endswith("_sum"):
                    sums[part] = sample.value
        return {part: _Times(found, sums[part]) for part, found in buckets.items()}

    def _drain(self, awaited: str) -> None:
        """Drain tokens once, while `awaited` has not come."""
        try:
            self.sink.drain()
        except SinkError as error:
            raise LinkBenchError(str(error)) from None
        self.scheduler.check()
        if time.monotonic() > self.give_up:
            raise LinkBenchError(f"timeout: no {awaited}")

    def expect(self, line: str) -> None:
        """Read the next line, and check that it equals `line`."""
        said = self.line()
        if said != line:
            raise LinkBenchError(f"the echo workers printed {said!r}, expected {line!r}")


def _result(case: Case, runs: Sequence[Run]) -> LinkResult:
    reports = [run.report for run in runs]

    def median(figure: Callable[[EchoReport], float], digits: int) -> float:
        return round(statistics.median(figure(report) for report in reports), digits)

    shares = [report.wait_s / (case.workers * report.elapsed_s) for report in reports]
    return LinkResult(
        workers=case.workers,
        rows=case.rows,
        step_ms=case.step_ms,
        in_flight=case.in_flight,
        rounds=len(runs),
        steps_per_s=median(lambda report: report.steps / report.elapsed_s, 1),
        worker_wait_share=round(statistics.median(shares), 5),
        worker_wait_share_min=round(min(shares), 5),
        worker_wait_share_max=round(max(shares), 5),
        worst_worker_wait_share=median(lambda report: report.worst_wait_s / report.elapsed_s, 5),
        wait_us_p50=median(lambda report: report.wait_p50_s * 1e6, 1),
        wait_us_p99=median(lambda report: report.wait_p99_s * 1e6, 1),
        late_us_p50=median(lambda report: report.late_p50_s * 1e6, 1),
        tokens_per_s=round(statistics.median(run.tokens_per_s for run in runs), 1),
        scheduler_cpu_us_per_step=round(
            statistics.median(run.scheduler_cpu_s / run.report.steps * 1e6 for run in runs), 1
        ),
        scheduler_cpu_share=round(statistics.median(run.scheduler_cpu_s / run.report.elapsed_s for run in runs), 3),
        burst=case.burst,
        journal=case.journal,
        standby=case.standby,
        rows_at_end=min(report.num_rows for report in reports),
        longest_turn_ms=round(max(run.longest_turn_s for run in runs) * 1e3, 3),
        worst_worker=reports[-1].worst_worker,
        thread_cpu_us_per_step={
            name: round(statistics.median(run.thread_cpu_s[name] / run.report.steps * 1e6 for run in runs), 1)
            for name in runs[0].thread_cpu_s
        },
        part_us_per_step={
            name: round(statistics.median(run.parts[name].total_s / run.report.steps * 1e6 for run in runs), 1)
            for name in runs[0].parts
        },
        longest_part_ms={
            name: round(max(run.parts[name].longest_s for run in runs) * 1e3, 3) for name in runs[0].parts
        },
    )


def as_json(results: Sequence[LinkResult]) -> dict[str, list[dict[str, object]]]:
    """Return the results in the format of `quire bench link --json`."""
    return {"results": [asdict(result) for result in results]}
