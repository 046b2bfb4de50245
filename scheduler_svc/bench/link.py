"""What lies between a worker and its next plan: the real scheduler process and real ZeroMQ, with echo workers.

Three processes, as deployed but for what they pretend: the scheduler as `quire scheduler` starts it, one process of
echo workers (`echo_worker`) whose steps take a given time, and this one as the front end (`token_sink`). Every row of
every worker decodes all the time. Measured are steps per second and the share of time that workers wait for a plan;
cases are run in turns, so that what else the machine does falls on all of them alike. Linux only.
"""

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from scheduler_svc.bench import echo_worker
from scheduler_svc.bench.echo_worker import EchoReport
from scheduler_svc.bench.token_sink import SinkError, TokenSink
from shared.config import SchedulerConfig, to_flags

PROMPT_TOKENS = 2 * echo_worker.BLOCK_SIZE
SETUP_S = 40.0
"""How long it may take until every row decodes."""
_NAP_S = 0.002
"""The front end looks at its socket every so often."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class LinkBenchError(Exception):
    """A run came to nothing; one line says why."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """What is measured: workers, rows of each, milliseconds of a step, plans in flight."""

    workers: int
    rows: int
    step_ms: float
    in_flight: int


DEFAULT_CASES = (
    Case(workers=1, rows=256, step_ms=5.0, in_flight=1),
    Case(workers=1, rows=256, step_ms=5.0, in_flight=2),
    Case(workers=1, rows=256, step_ms=1.0, in_flight=1),
    Case(workers=1, rows=256, step_ms=1.0, in_flight=2),
    Case(workers=64, rows=256, step_ms=20.0, in_flight=2),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of one case."""

    report: EchoReport
    tokens_per_s: float
    """That the front end received."""
    scheduler_cpu_s: float
    """Of all threads of the scheduler process, while it was measured."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """Medians over the rounds of one case; `worker_wait_share` is of all workers' time together."""

    workers: int
    rows: int
    step_ms: float
    in_flight: int
    rounds: int
    steps_per_s: float
    """Of all workers together."""
    worker_wait_share: float
    worker_wait_share_min: float
    worker_wait_share_max: float
    worst_worker_wait_share: float
    """Of the worker that waited longest."""
    wait_us_p50: float
    wait_us_p99: float
    late_us_p50: float
    """How long after a step's end the echo worker's answer went out."""
    tokens_per_s: float
    scheduler_cpu_us_per_step: float
    scheduler_cpu_share: float
    """Of one core."""


def cases_for(*, workers: int | None = None, rows: int | None = None, step_ms: float | None = None) -> tuple[Case, ...]:
    """The default cases, or those that fit what was asked for, with one and two plans in flight."""
    if workers is rows is step_ms is None:
        return DEFAULT_CASES
    workers = workers or 1
    steps = (step_ms,) if step_ms is not None else (5.0, 1.0) if workers == 1 else (20.0,)
    return tuple(Case(workers, rows or 256, step, in_flight) for step in steps for in_flight in (1, 2))


def run_rounds(
    cases: Sequence[Case],
    *,
    rounds: int,
    seconds: float,
    folder: Path,
    environment: Mapping[str, str],
    progress: Callable[[str], None] = lambda line: None,
) -> list[LinkResult]:
    """Measures every case `rounds` times.

    Args:
        cases: what to measure.
        rounds: how often.
        seconds: how long each measurement takes, set-up not counted.
        folder: for sockets and the scheduler's log; its path must be short enough for a Unix socket.
        environment: of the child processes; names us as the supervisor that they end with.
        progress: is told what is being measured.

    Raises:
        LinkBenchError: a run came to nothing.
    """
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    for number in range(1, rounds + 1):
        for case in cases:
            progress(f"round {number} of {rounds}: {case}")
            runs[case].append(measure(case, seconds, folder, environment))
    return [_result(case, repeated) for case, repeated in runs.items()]


def measure(case: Case, seconds: float, folder: Path, environment: Mapping[str, str]) -> Run:
    """One measurement.

    Raises:
        LinkBenchError: it came to nothing.
    """
    # As many steps as could be made, and then some: no request may end while it is measured.
    max_tokens = 1000 + int(1000 * (SETUP_S + echo_worker.WARM_UP_S + seconds) / case.step_ms)
    max_model_len = PROMPT_TOKENS + max_tokens
    # Memory for the time in which all decode, which is all but a moment of the set-up.
    expected_len = PROMPT_TOKENS + int(1000 * (5 + 2 * seconds) / case.step_ms)
    config = SchedulerConfig(
        frontend_address=f"ipc://{folder}/frontends",
        worker_address=f"ipc://{folder}/workers",
        max_num_seqs=case.rows,
        max_num_batched_tokens=case.rows * PROMPT_TOKENS,
        max_queued_requests=case.workers * case.rows,
        max_plans_in_flight=case.in_flight,
    )
    echo_flags = {
        "address": config.worker_address,
        "workers": case.workers,
        "rows": case.rows,
        "step-ms": case.step_ms,
        "max-model-len": max_model_len,
        "num-blocks": case.rows * (expected_len // echo_worker.BLOCK_SIZE + 1),
        "max-tokens-per-step": config.max_num_batched_tokens,
        "seconds": seconds,
        "give-up-s": SETUP_S,
    }
    with ExitStack() as stack:
        scheduler = stack.enter_context(
            _Process(["quire.cli.main", "scheduler", *to_flags(config)], folder / "scheduler.log", environment)
        )
        echo = stack.enter_context(
            _Process(
                ["scheduler_svc.bench.echo_worker", *(f"--{name}={value}" for name, value in echo_flags.items())],
                folder / "echo.log",
                environment,
            )
        )
        context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
        sink = TokenSink(context, config.frontend_address)
        stack.callback(sink.close)
        stand = _Stand(scheduler, echo, sink, time.monotonic() + 2 * SETUP_S + seconds)
        stand.expect("joined")
        sink.submit(
            case.workers * case.rows,
            max_tokens=max_tokens,
            prompt_tokens=PROMPT_TOKENS,
            block_size=echo_worker.BLOCK_SIZE,
            fingerprint=echo_worker.FINGERPRINT,
            vocab_size=echo_worker.VOCAB,
        )
        stand.expect("measuring")
        cpu_s, tokens = scheduler.cpu_seconds(), sink.num_tokens
        report = EchoReport(**json.loads(stand.line()))
        return Run(
            report=report,
            tokens_per_s=(sink.num_tokens - tokens) / report.elapsed_s,
            scheduler_cpu_s=scheduler.cpu_seconds() - cpu_s,
        )


class _Process:
    """A child that ends with us: by its lifeline or, should it have none, when its standard input is closed."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._name, self._log = command[0], log
        with log.open("wb") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
                # A line that lies in a buffer of ours would be invisible to `select`.
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
        """Waits for output, or the end of it."""
        assert self._child.stdout is not None
        return bool(select.select([self._child.stdout], [], [], timeout_s)[0])

    def line(self) -> str:
        """The next line it prints.

        Raises:
            LinkBenchError: it ended instead.
        """
        assert self._child.stdout is not None
        line: bytes = self._child.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1)
            raise self._ended()
        return line.decode().strip()

    def check(self) -> None:
        """Makes sure that it lives.

        Raises:
            LinkBenchError: it has ended.
        """
        if self._child.poll() is not None:
            raise self._ended()

    def _ended(self) -> LinkBenchError:
        last_words = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        return LinkBenchError(f"{self._name} ended with status {self._child.poll()}: {last_words}")

    def cpu_seconds(self) -> float:
        """CPU time so far, all threads."""
        fields = Path(f"/proc/{self._child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class _Stand:
    """What takes part in one measurement, until `give_up` at the latest."""

    scheduler: _Process
    echo: _Process
    sink: TokenSink
    give_up: float

    def line(self) -> str:
        """The next line of the echo workers; tokens are drained meanwhile.

        Raises:
            LinkBenchError: nothing will come of it.
        """
        while not self.echo.has_line(_NAP_S):
            try:
                self.sink.drain()
            except SinkError as error:
                raise LinkBenchError(str(error)) from None
            self.scheduler.check()
            if time.monotonic() > self.give_up:
                raise LinkBenchError("the echo workers say nothing")
        return self.echo.line()

    def expect(self, line: str) -> None:
        """Takes the next line, which is to be this one."""
        said = self.line()
        if said != line:
            raise LinkBenchError(f"the echo workers say {said!r} instead of {line!r}")


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
    )


def as_json(results: Sequence[LinkResult]) -> dict[str, list[dict[str, object]]]:
    """The shape that `quire bench link --json` writes."""
    return {"results": [asdict(result) for result in results]}
