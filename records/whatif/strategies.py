"""Simulates the last minutes' requests under static, dynamic and continuous batching, for comparison.

All three strategies have the same workers with the same rows, and the step times from the record. As in
`quire bench strategies`, a static batch waits up to ten seconds until it is full, a dynamic batch up to 50 ms.
"""

import dataclasses
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from quire.admin.v1 import admin_pb2 as admin
from records.whatif.acceptance import Acceptance
from records.whatif.answer import fleet
from records.whatif.arrivals import WhatIfError
from records.whatif.figures import Latency
from records.whatif.load import Arrival, Load, Member
from records.whatif.recent import Clock, IsLate, LimitedScheduler, read_recent, seconds_of, simulate_newest
from records.whatif.settings import change
from records.whatif.simulate import START_S, Simulated, SimulationError, simulate
from records.whatif.step_times import StepTimes, StepTimesError, learn
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.errors import InvalidLimitsError
from scheduler_svc.core.interface.events import Event, StepDone
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Peer, RequestEnded
from scheduler_svc.core.memory.token_facts import TokenFacts
from shared.config import ConfigError
from shared.errors import FieldViolation, InvalidRequestError, RequestNotFoundError

DEFAULT_ROWS, MAX_ROWS = 8, 256
MAX_STAYS = 2000
STRATEGIES = {
    "static": ("batching=static", "max_wait_ms=10000"),
    "dynamic": ("batching=dynamic", "max_wait_ms=50"),
    "continuous": ("batching=continuous",),
}


def check_comparison(question: admin.CompareStrategiesRequest) -> float:
    """Check a query; return the selected period's length in seconds before the end of the record.

    Raises:
        InvalidRequestError: the question is not valid.
    """
    if question.rows > MAX_ROWS:
        raise InvalidRequestError(FieldViolation("rows", f"must be at most {MAX_ROWS}"))
    return seconds_of(question.since if question.HasField("since") else None)


def compare_strategies(
    question: admin.CompareStrategiesRequest, place: Path, ends_at: float
) -> admin.CompareStrategiesResponse:
    """Answer a question from the record in a folder or file.

    Args:
        question: the period whose requests are simulated, and the number of rows.
        place: the record.
        ends_at: monotonic time at which the caller stops waiting, s.

    Raises:
        InvalidRequestError: the question is not valid.
        RequestNotFoundError: the record has too little to simulate.
        UnreadableRecordError: a file is not a record.
        OSError: a file cannot be read.
    """
    since_s = check_comparison(question)
    try:
        recorded, is_whole = read_recent(place, since_s, ends_at)
        times = dataclasses.replace(learn(recorded.samples, disk_samples=recorded.disk_samples), pace=())
        response = run_strategies(
            recorded.load,
            times,
            acceptance=recorded.acceptance,
            since_s=since_s,
            rows=question.rows or DEFAULT_ROWS,
            ends_at=ends_at,
        )
    except (WhatIfError, StepTimesError, SimulationError, ConfigError, InvalidLimitsError) as error:
        raise RequestNotFoundError(f"compare: {error}") from None
    response.older_left_out |= not is_whole
    return response


def run_strategies(
    load: Load,
    times: StepTimes,
    *,
    since_s: float,
    acceptance: Acceptance | None = None,
    rows: int,
    ends_at: float = math.inf,
    clock: Clock = time.monotonic,
) -> admin.CompareStrategiesResponse:
    """Serve the newest requests of a load under each strategy.

    Args:
        load: requests and workers.
        times: the model of step times.
        acceptance: which drafts are accepted; None if workers verify none.
        since_s: length of the selected period, in seconds before the end of the load.
        rows: number of rows in each worker.
        ends_at: time at which the caller stops waiting, s.
        clock: the clock to which `ends_at` refers.

    Raises:
        WhatIfError: no request arrived in this period.
        SimulationError: the load cannot be served with so many rows.
    """
    since = load.duration - since_s
    asked = [each for each in load.arrivals if each.at >= since and not each.left_out]
    if not asked:
        raise WhatIfError(f"no request has arrived in the last {since_s:g} s; send some, or ask for a longer time")
    members = [dataclasses.replace(each, joined=0.0) for each in load.members if each.lost is None]
    if not members:
        raise WhatIfError("the record has no worker that is still connected; wait until a worker joins")

    def simulated(arrivals: list[Arrival], is_late: IsLate) -> admin.CompareStrategiesResponse:
        response = admin.CompareStrategiesResponse(
            requests=len(arrivals),
            arrival_seconds=arrivals[-1].at - arrivals[0].at,
            rows=rows,
            older_left_out=len(arrivals) < len(asked),
        )
        for name, settings in STRATEGIES.items():
            run = _run(arrivals, members, load.config, times, acceptance, settings, rows, is_late)
            _fill(response.runs.add(name=name), run, rows)
        return response

    return simulate_newest(asked, simulated, ends_at, clock)


@dataclass(slots=True)
class _Run:
    simulated: Simulated
    stays: "list[_Stay]"


@dataclass(slots=True)
class _Stay:
    """A request's stay in a row of the first worker; times on the core's clock."""

    row: int
    request: int
    begin: float
    decode: float = 0.0
    """When the result of its last prompt chunk arrived; 0 before that."""
    end: float = 0.0


@dataclass(slots=True)
class _Chart:
    """The rows of the first worker over time."""

    stays: list[_Stay] = field(default_factory=list)
    worker: Peer = b""
    rows: dict[int, _Stay] = field(default_factory=dict)
    chunks: dict[int, list[int]] = field(default_factory=dict)
    """By step without a result: rows with a chunk of their prompt."""

    def planned(self, plan: Plan, now: float) -> None:
        self.worker = self.worker or plan.worker
        if plan.worker != self.worker:
            return
        for row in plan.leaves.tolist():
            self._left(row, now)
        for admission in plan.admissions:
            self._left(admission.row, now)
            self.rows[admission.row] = stay = _Stay(admission.row, admission.stream, now)
            if len(self.stays) < MAX_STAYS:
                self.stays.append(stay)
        if len(plan.chunk_rows):
            self.chunks[plan.step] = plan.chunk_rows.tolist()

    def answered(self, done: StepDone, now: float) -> None:
        if done.worker == self.worker:
            for row in self.chunks.pop(done.step, ()):
                if row in self.rows:
                    self.rows[row].decode = now

    def ended(self, end: RequestEnded, now: float) -> None:
        for row, stay in self.rows.items():
            if stay.request == end.stream:
                self._left(row, now)
                return

    def _left(self, row: int, now: float) -> None:
        stay = self.rows.pop(row, None)
        if stay is not None:
            stay.end = now


class _ChartedScheduler(LimitedScheduler):
    """A core with a time limit that also records the rows of its first worker for a chart."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts, chart: _Chart, is_late: IsLate) -> None:
        super().__init__(config, incarnation, facts, is_late)
        self._chart = chart

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, StepDone):
            self._chart.answered(event, now)
        effects = super().handle(event, now)
        for effect in effects:
            if isinstance(effect, RequestEnded):
                self._chart.ended(effect, now)
        return effects

    def plan(self, peer: Peer, now: float) -> tuple[Plan | None, list[Effect]]:
        plan, effects = super().plan(peer, now)
        if plan is not None:
            self._chart.planned(plan, now)
        return plan, effects


def _run(
    arrivals: list[Arrival],
    members: list[Member],
    recorded: CoreConfig,
    times: StepTimes,
    acceptance: Acceptance | None,
    settings: tuple[str, ...],
    rows: int,
    is_late: IsLate,
) -> _Run:
    changed = change(recorded, [*settings, f"max_batch_size={rows}", f"max_num_seqs={rows}"])
    chart = _Chart()
    simulated = simulate(
        arrivals,
        fleet(members, None, changed),
        changed.config,
        times,
        acceptance=acceptance,
        make_core=lambda config, incarnation, facts: _ChartedScheduler(config, incarnation, facts, chart, is_late),
    )
    return _Run(simulated, chart.stays)


def _fill(message: admin.StrategyRun, run: _Run, rows: int) -> None:
    figures = run.simulated.figures
    message.seconds = figures.duration_s
    message.output_tokens_per_second = figures.output_tokens_per_s
    message.row_share = min(1.0, figures.rows_per_step / rows)
    for into, latency in (
        (message.ttft, figures.ttft),
        (message.itl, figures.itl),
        (message.latency, figures.e2e),
    ):
        _fill_quantiles(into, latency)
    for stay in run.stays:
        end = max(stay.end, stay.begin)
        message.stays.add(
            row=stay.row,
            request=stay.request,
            begin=round(stay.begin - START_S, 6),
            decode=round(min(stay.decode or end, end) - START_S, 6),
            end=round(end - START_S, 6),
        )


def _fill_quantiles(message: admin.Quantiles, latency: Latency) -> None:
    message.p50, message.p99 = latency.p50, latency.p99
    message.count = int(latency.p99 > 0)
