"""Prediction for the console: simulates the last minutes' requests under other settings, and adds the measured results.

If there is time, requests from before the selected period are simulated too, so that the queue is realistic when the
period begins. These requests are excluded from the results.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from quire.admin.v1 import admin_pb2 as admin
from records.whatif.answer import fleet, notes_on_disks
from records.whatif.arrivals import Recorded, WhatIfError
from records.whatif.figures import Figures, Latency
from records.whatif.load import Arrival, Member
from records.whatif.page import disturbance
from records.whatif.recent import IsLate, LimitedScheduler, read_recent, seconds_of, simulate_newest
from records.whatif.settings import Changed, change
from records.whatif.simulate import Simulated, SimulationError, simulate
from records.whatif.step_times import StepTimes, StepTimesError, learn
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.errors import InvalidLimitsError
from shared.config import ConfigError
from shared.errors import FieldViolation, InvalidRequestError, RequestNotFoundError

MAX_SETTINGS, MAX_WORKERS = 32, 64
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0
_FEW_EXTRAPOLATED = 0.01
"""If the share of extrapolated steps is larger than this, the page shows a warning."""
_FEW_REQUESTS = 20
"""If fewer requests than this are simulated, the page shows a warning."""


def check_prediction(question: admin.PredictRequest) -> float:
    """Check a question as far as possible without the record; return the length of the period in question, s.

    Raises:
        InvalidRequestError: the question is not valid.
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
    ):
        if not is_valid:
            raise InvalidRequestError(FieldViolation(field, remedy))
    return seconds_of(question.since if question.HasField("since") else None)


def predict(question: admin.PredictRequest, place: Path, ends_at: float) -> admin.PredictResponse:
    """Answer a question from the record in a folder or file.

    Args:
        question: the period whose requests are simulated, and the settings to change.
        place: the record.
        ends_at: monotonic time at which the caller stops waiting, s.

    Raises:
        InvalidRequestError: the question is not valid.
        RequestNotFoundError: the record has too little to simulate.
        UnreadableRecordError: a file is not a record.
        OSError: a file cannot be read.
    """
    since_s = check_prediction(question)
    try:
        recorded, _ = read_recent(place, since_s, ends_at)
        times = learn(recorded.samples, recorded.begin, recorded.disk_samples)
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
    """Simulate as many requests as there is time for, with the current settings and with the changed settings."""
    others = [
        _with_memory(each, question.kv_memory_factor) for each in fleet(members, question.workers or None, changed)
    ]
    config = recorded.load.config
    num_asked = sum(1 for each in recorded.load.arrivals if not each.left_out)

    def run(arrivals: Sequence[Arrival], is_late: IsLate) -> admin.PredictResponse:
        def simulated(members: Sequence[Member], config: CoreConfig) -> Simulated:
            return simulate(
                arrivals,
                members,
                config,
                times,
                acceptance=recorded.acceptance,
                make_core=lambda config, incarnation, facts: LimitedScheduler(config, incarnation, facts, is_late),
            )

        count = sum(1 for each in arrivals if not each.left_out)
        present, predicted = simulated(members, config), simulated(others, changed.config)
        notes = [*_notes(recorded, count, num_asked), *notes_on_disks(times, others)]
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

    return simulate_newest(recorded.load.arrivals, run, ends_at)


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


def to_figures(found: Figures) -> admin.RunFigures:
    """Convert the results of a run to the operator API's message."""
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
