"""Answers the queries of `quire explain` from a record's files: one request, the slowest ones, or a step."""

import json
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

from quire.admin.v1 import admin_pb2 as admin
from records.explain.accounting import account
from records.explain.facts import Life
from records.explain.page import as_json, page, seconds_text, step_json, step_page
from records.explain.reading import Findings, slowest, study
from records.reader import Segment, read
from shared.errors import FieldViolation, InvalidRequestError, RequestNotFoundError
from shared.request_names import may_mean, meant

MAX_SLOWEST = 100
DEFAULT_SINCE_S = 600.0
_MAX_GAPS = 4
"""Maximum number of listed gaps in the record; the newest gaps are listed."""
_OLD_S = 60.0
"""If the newest entry is older than this, recording has stopped: an idle scheduler makes two entries per second."""
_MAX_LIVES = 16
"""Maximum number of explained requests with the same id (choices, or reuses of the id); the newest are explained."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An explanation."""

    text: str
    values: dict[str, Any]

    def message(self) -> admin.ExplainResponse:
        """Return the answer of the operator API."""
        return admin.ExplainResponse(text=self.text, json=json.dumps(self.values))


def check(question: admin.ExplainRequest) -> None:
    """Check a question, as far as that is possible without the record.

    Raises:
        InvalidRequestError: the question is not valid.
    """
    if not (question.request_id or question.slowest or question.step):
        raise InvalidRequestError(
            FieldViolation("request_id", "missing; add the id of a request, a number of slowest requests, or a step")
        )
    if question.step:
        _step_named(question.step)


def answer(question: admin.ExplainRequest, place: Path) -> Answer:
    """Answer a question from the record in a folder or file.

    Raises:
        InvalidRequestError: the question is not valid.
        RequestNotFoundError: the record has no such request or step.
        UnreadableRecordError: a file is not a record.
        OSError: a file cannot be read.
    """
    check(question)
    segments = read(place)
    if question.request_id:
        return _of_request(question.request_id, segments)
    if question.step:
        return _of_step(question.step, segments)
    since_s = question.since.ToMilliseconds() / 1e3 if question.HasField("since") else DEFAULT_SINCE_S
    return _of_slowest(min(question.slowest, MAX_SLOWEST), since_s, segments)


def _of_request(request_id: str, segments: list[Segment]) -> Answer:
    """Look for a request in the newest segments first: a record is large, and most questions are about the present."""
    count = 1
    while True:
        found = study(segments[-count:], wanted=lambda _key, name: may_mean(request_id, name))
        ids = meant(request_id, (life.request_id for life in found.lives))
        found.lives = [life for life in found.lives if life.request_id in ids]
        is_whole = (
            found.lives
            and not found.needs_earlier
            and all(life.notes[0].time >= found.first_time for life in found.lives)
        )
        if is_whole or count >= len(segments):
            break
        count *= 2
    if not found.lives:
        raise RequestNotFoundError(f"request_id: no request with this id is in the record{_extent(found)}")
    accounts = [account(life) for life in _with_choices(found.lives)[-_MAX_LIVES:]]
    note = f"Times within steps are known to {seconds_text(found.clock_error_s)}: the error of the workers' clocks.\n"
    text = "\n".join(page(each) for each in accounts) + note + _gaps_text(found)
    values = [as_json(each) for each in accounts]
    return Answer(text, {"requests": values, "clock_error_s": found.clock_error_s, "gaps_unix_s": found.gaps})


def _with_choices(lives: list[Life]) -> list[Life]:
    """Return the lives in arrival order, with choice numbers.

    The record has no choice numbers. A call's choices are submitted in order, and share an id that no other request of
    the tenant may use until all of them have ended.
    """
    calls: dict[tuple[bytes, str, str], list[list[int]]] = {}
    ends: dict[tuple[bytes, str, str], float] = {}
    for at, life in enumerate(lives):
        name = life.key.frontend, life.tenant, life.request_id
        began, ended = life.notes[0].time, inf if life.until is not None else life.notes[-1].time
        if began > ends.get(name, -inf):
            calls.setdefault(name, []).append([])
        calls[name][-1].append(at)
        ends[name] = max(ended, ends.get(name, -inf))
    numbered = list(lives)
    for call in (call for each in calls.values() for call in each if len(call) > 1):
        for choice, at in enumerate(sorted(call, key=lambda at: lives[at].key.stream)):
            numbered[at] = replace(lives[at], choice=choice)
    return numbered


def _extent(found: Findings) -> str:
    """Return, as text, the period that a record covers and the gaps in it."""
    if not found.last_wall:
        return ", which is empty"
    text = f", which goes from {_clock(found.first_wall)} to {_clock(found.last_wall)} UTC"
    if found.gaps:
        text += " and lacks " + ", ".join(f"{_clock(begin)} to {_clock(end)}" for begin, end in found.gaps[-_MAX_GAPS:])
    if time.time() - found.last_wall > _OLD_S:
        text += "; nothing is recorded since then: see the metric quire_record_writes and the scheduler's log"
    return text


def _gaps_text(found: Findings) -> str:
    """Return one line that lists the record's gaps; empty if there are none."""
    if not found.gaps:
        return ""
    gaps = ", ".join(f"{_clock(begin)} to {_clock(end)}" for begin, end in found.gaps[-_MAX_GAPS:])
    return f"The record lacks {gaps} UTC.\n"


def _clock(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S}"


def _of_slowest(most: int, since_s: float, segments: list[Segment]) -> Answer:
    times = [_written_at(segment) for segment in segments]
    newest = max(times, default=0.0)
    recent = [segment for segment, time in zip(segments, times, strict=True) if time >= newest - since_s]
    chosen = slowest(study(recent), most, since_s)
    wanted = {(each.key, each.request_id) for each in chosen}
    found = study(recent, wanted=lambda key, name: (key, name) in wanted)
    lives: dict[tuple[object, str], Life] = {(life.key, life.request_id): life for life in found.lives}
    row = "{:>10}  {:<32} {:<12} {:>6}  {}".format
    lines, values = [row("time", "request", "end", "share", "first cause")], []
    for each in chosen:
        life = lives.get((each.key, each.request_id))
        if life is None:
            continue
        explained = account(life)
        first = explained.causes[0] if explained.causes else None
        share = f"{first.seconds / explained.total_s:.0%}" if first is not None else ""
        name = first.kind.value if first is not None else ""
        lines.append(row(seconds_text(explained.total_s), each.request_id, each.reason, share, name))
        values.append({"ended_unix_s": each.ended_at, "end": each.reason, **as_json(explained)})
    lines.append("`quire explain REQUEST` explains one of them.")
    return Answer("\n".join(lines) + "\n" + _gaps_text(found), {"slowest": values, "gaps_unix_s": found.gaps})


def _written_at(segment: Segment) -> float:
    """Return when a segment was last written; 0 if the recorder has deleted the file meanwhile."""
    try:
        return segment.path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _of_step(name: str, segments: list[Segment]) -> Answer:
    worker_id, number = _step_named(name)
    found: Findings = study(segments, wanted_step=(worker_id, number))
    if not found.steps:
        raise RequestNotFoundError(f"step: the record has no completed step {number} of worker {worker_id!r}")
    text = "\n".join(step_page(step, found.names) for step in found.steps)
    return Answer(text, {"steps": [step_json(step, found.names) for step in found.steps]})


def _step_named(name: str) -> tuple[str, int]:
    worker_id, _, number = name.rpartition(":")
    if not worker_id or not number.isdigit():
        raise InvalidRequestError(FieldViolation("step", "not of the form WORKER:NUMBER, for example worker-0:1234"))
    return worker_id, int(number)
