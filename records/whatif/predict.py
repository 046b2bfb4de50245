"""Prediction for the console: the requests of the last minutes under other settings, next to what was measured.

The answer comes in time also from a busy machine: a few of the newest requests are simulated first, which shows how
many more there is time for. Requests from before the asked time are served as well where there is time, so that the
queue at its beginning is right; they are in no figure.
"""

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from quire.admin.v1 import admin_pb2 as admin
from records.whatif.answer import fleet
from records.whatif.arrivals import Recorded, WhatIfError
from records.whatif.figures import Figures, Latency
from records.whatif.load import Arrival, Member
from records.whatif.page import disturbance
from records.whatif.recent import MAX_OUTPUTS, MAX_REQUESTS, OutOfTimeError, read_recent
from records.whatif.settings import Changed, change
from records.whatif.simulate import Simulated, SimulationError, simulate
from records.whatif.step_times import StepTimes, StepTimesError, learn
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.errors import InvalidLimitsError
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from shared.config import ConfigError
from shared.errors import FieldViolation, InvalidRequestError, RequestNotFoundError

DEFAULT_SINCE_S, MAX_SINCE_S = 180.0, 900.0
MAX_SETTINGS, MAX_WORKERS = 32, 64
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
_FEW_OUTPUTS = 4_000
"""Generated tokens of the requests that are simulated first."""
_SIMULATING_SHARE = 0.7
"""Share of the time left after the first simulation for which the second one is planned."""
_FEW_EXTRAPOLATED = 0.01
"""Share of extrapolated steps from which on the page warns."""
_FEW_REQUESTS = 20
"""Simulated requests below which the page warns."""


def check_prediction(question: admin.PredictRequest) -> None:
    """Check a question, as far as that is possible without the record.

    Raises:
        InvalidRequestError: it is not valid.
    """
    factor = question.kv_memory_factor
    for field, is_valid, remedy in (
        ("workers", question.workers <= MAX_WORKERS, f"must be at most {MAX_WORKERS}"),
        ("settings", len(question.settings) <= MAX_SETTINGS, f"must be at most {MAX_SETTINGS}"),
        (
            "kv_memory_factor",
            not factor or LEAST_FACTOR <= factor <= MOST_FACTOR,
            f"must be from {LEAST_FACTOR} to {MOST_FACTOR:g}",
        ),
        (
            "since",
            not question.HasField("since") or 0 < question.since.ToMilliseconds() <= MAX_SINCE_S * 1e3,
            f"must be more than 0 and at most {MAX_SINCE_S:g} s",
        ),
    ):
        if not is_valid:
            raise InvalidRequestError(FieldViolation(field, remedy))


def predict(question: admin.PredictRequest, place: Path, ends_at: float) -> admin.PredictResponse:
    """Answer a question from the record in a folder or file.

    Args:
        question: which requests, and what to change.
        place: the record.
        ends_at: monotonic time at which the caller gives up, s.

    Raises:
        InvalidRequestError: the question is not valid.
        RequestNotFoundError: the record has too little to simulate.
        UnreadableRecordError: a file is not a record.
        OSError: a file cannot be read.
    """
    check_prediction(question)
    since_s = question.since.ToMilliseconds() / 1e3 if question.HasField("since") else DEFAULT_SINCE_S
    try:
        recorded, _ = read_recent(place, since_s, ends_at)
        times = learn(recorded.samples, recorded.begin)
        changed = change(recorded.load.config, list(question.settings))
    except (WhatIfError, StepTimesError) as error:
        raise RequestNotFoundError(f"not enough record yet: {error}") from None
    except (ConfigError, InvalidLimitsError) as error:
        raise InvalidRequestError(FieldViolation("settings", str(error).removeprefix("set: "))) from None
    members = [dataclasses.replace(each, joined=0.0) for each in recorded.load.members if each.lost is None]
    if not members:
        raise RequestNotFoundError("not enough record yet: no worker of the record is still connected")
    if not recorded.figures.requests:
        raise RequestNotFoundError(
            f"not enough record yet: no request has ended that arrived in the last {since_s:g} s; try again later"
        )
    try:
        return _predict(question, recorded, dataclasses.replace(times, pace=()), members, changed, ends_at)
    except SimulationError as error:
        raise RequestNotFoundError(f"this cannot be simulated: {error}") from None


def _predict(
    question: admin.PredictRequest,
    recorded: Recorded,
    times: StepTimes,
    members: list[Member],
    changed: Changed,
    ends_at: float,
) -> admin.PredictResponse:
    """Simulate as many requests as there is time for, with the present and with the changed settings."""
    others = [
        _with_memory(each, question.kv_memory_factor) for each in fleet(members, question.workers or None, changed)
    ]
    config = recorded.load.config
    num_asked = sum(1 for each in recorded.load.arrivals if not each.left_out)

    def run(arrivals: Sequence[Arrival], ends_at: float) -> admin.PredictResponse:
        def simulated(members: Sequence[Member], config: CoreConfig) -> Simulated:
            def make(config: CoreConfig, incarnation: int, facts: TokenFacts) -> Scheduler:
                return _LimitedScheduler(config, incarnation, facts, ends_at)

            return simulate(arrivals, members, config, times, acceptance=recorded.acceptance, make_core=make)

        count = sum(1 for each in arrivals if not each.left_out)
        present, predicted = simulated(members, config), simulated(others, changed.config)
        notes = _notes(recorded, count, num_asked)
        if predicted.extrapolated_share > _FEW_EXTRAPOLATED:
            notes.append(
                f"caution: {predicted.extrapolated_share:.0%} of the predicted steps are larger than any step of the"
                " record, so their times are extrapolated"
            )
        return admin.PredictResponse(
            measured=to_figures(recorded.figures),
            present=to_figures(present.figures),
            predicted=to_figures(predicted.figures),
            requests=count,
            asked_requests=num_asked,
            present_workers=len(members),
            predicted_workers=len(others),
            notes=notes,
        )

    few = latest(recorded.load.arrivals, _FEW_OUTPUTS)
    began = time.monotonic()
    first = run(few, float("inf"))
    now = time.monotonic()
    speed = sum(each.num_outputs for each in few) / max(now - began, 1e-9)
    arrivals = latest(recorded.load.arrivals, min(MAX_OUTPUTS, speed * (ends_at - now) * _SIMULATING_SHARE))
    if len(arrivals) <= len(few):
        return first
    with contextlib.suppress(OutOfTimeError):
        return run(arrivals, now + (ends_at - now) * (1 + _SIMULATING_SHARE) / 2)
    return first


def latest(arrivals: Sequence[Arrival], max_outputs: float) -> list[Arrival]:
    """Return the newest requests within the limits, at least one; the first one arrives at 0."""
    found: list[Arrival] = []
    outputs = 0
    for each in reversed(arrivals):
        outputs += each.num_outputs
        if found and (outputs > max_outputs or len(found) == MAX_REQUESTS):
            break
        found.append(each)
    return [dataclasses.replace(each, at=each.at - found[-1].at) for each in reversed(found)]


def _with_memory(member: Member, factor: float) -> Member:
    """Return a worker with another size of KV memory."""
    if not factor:
        return member
    blocks = max(1, round(member.hello.num_blocks * factor))
    return dataclasses.replace(member, hello=dataclasses.replace(member.hello, num_blocks=blocks))


def _notes(recorded: Recorded, count: int, num_asked: int) -> list[str]:
    notes = []
    if count < num_asked:
        notes.append(f"the newest {count} of {num_asked} requests are simulated, so that the answer comes in time")
    if count < _FEW_REQUESTS:
        notes.append(f"only {count} requests: the figures may differ much from those of a longer time")
    if recorded.figures.requests < num_asked:
        notes.append("requests that have not ended are in the simulations, and not in the measured figures")
    return [*notes, *disturbance(learn(recorded.samples, recorded.begin))]


class _LimitedScheduler(Scheduler):
    """The core, with a limit of the time that a simulation may take."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts, ends_at: float) -> None:
        super().__init__(config, incarnation, facts)
        self._ends_at = ends_at

    def plan(self, peer: Peer, now: float) -> tuple[Plan | None, list[Effect]]:
        if time.monotonic() > self._ends_at:
            raise OutOfTimeError
        return super().plan(peer, now)


def to_figures(found: Figures) -> admin.RunFigures:
    """Return the numbers of a run as operators get them."""
    return admin.RunFigures(
        completed_requests=found.requests,
        good_requests=found.good,
        targeted_requests=found.targeted,
        seconds=found.duration_s,
        output_tokens_per_second=found.output_tokens_per_s,
        ttft=_quantiles(found.ttft),
        itl=_quantiles(found.itl),
        latency=_quantiles(found.e2e),
        rows_per_step=found.rows_per_step,
    )


def _quantiles(found: Latency) -> admin.Quantiles:
    return admin.Quantiles(count=int(found.p99 > 0), p50=found.p50, p99=found.p99)
