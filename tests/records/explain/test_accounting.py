"""Causes sum to the end-to-end time, none is negative, and a planted cause comes first."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.explain.accounting import Account, Cause, CauseKind, account
from records.explain.advice import _ADVICE, advice
from records.explain.facts import Holding, Life, Obstacle, Passing, Report, Step, StreamKey, Usual
from records.explain.page import as_json, page
from scheduler_svc.core.interface.records import Note, NoteKind, WaitReason
from shared.config import FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig

ME = StreamKey(b"front/1", 1)
OTHER = StreamKey(b"front/1", 2)
_TEXTS = {NoteKind.WAITS: [each.value for each in WaitReason], NoteKind.HELD: ["memory", WaitReason.CREDIT.value]}
_LEAVING = [NoteKind.PREEMPTED, NoteKind.SWAPPED, NoteKind.LOST, NoteKind.MOVED, NoteKind.PREFIX_FAILED]


def _note(time: float, kind: NoteKind, text: str = "", by: StreamKey | None = None) -> Note:
    return Note(frontend=ME.frontend, stream=ME.stream, time=time, kind=kind, text=text or kind.value, by=by)


_SECONDS = st.floats(0.0, 3.0)


@st.composite
def _lives(draw: st.DrawFn) -> Life:
    """Histories that a core could note, with steps at arbitrary times."""
    time, in_row = draw(st.floats(0, 1e6)), False
    notes = [_note(time, NoteKind.ARRIVED)]
    for _ in range(draw(st.integers(0, 12))):
        time += draw(_SECONDS)
        choices = [NoteKind.HELD, NoteKind.FIRST_TOKEN, *_LEAVING] if in_row else [NoteKind.WAITS, NoteKind.ADMITTED]
        kind = draw(st.sampled_from(choices))
        in_row = kind is NoteKind.ADMITTED or (in_row and kind not in _LEAVING)
        notes.append(_note(time, kind, draw(st.sampled_from(_TEXTS.get(kind, [kind.value]))), by=OTHER))
    begin, end = notes[0].time, time + draw(_SECONDS)
    is_live = draw(st.booleans())
    if not is_live:
        notes.append(_note(end, NoteKind.ENDED))
    steps = []
    answered = begin - 1.0
    for number in range(draw(st.integers(0, 20))):
        answered += draw(_SECONDS)
        planned = answered - draw(_SECONDS)
        chunks = {key: draw(st.integers(1, 64)) for key in (ME, OTHER) if draw(st.booleans())}
        steps.append(
            Step(
                worker_id="w",
                number=number,
                planned=planned,
                answered=answered,
                started=draw(st.none() | st.floats(planned - 1, answered + 1)),
                prepare_s=draw(_SECONDS),
                forward_s=draw(_SECONDS),
                sample_s=draw(_SECONDS),
                copy_s=draw(_SECONDS),
                decodes=frozenset({ME, OTHER} - set(chunks)) if draw(st.booleans()) else frozenset(),
                chunks=chunks,
            )
        )
    report = None
    if draw(st.booleans()):
        ended = end - begin + draw(_SECONDS)
        parts = [draw(_SECONDS) for _ in range(6)]
        report = Report(
            submitted_s=parts[0],
            tokenise_s=parts[1],
            grammar_s=parts[2],
            ended_s=ended,
            finished_s=ended + parts[3],
            detokenise_s=parts[4],
            client_s=parts[5],
        )
    return Life(
        key=ME,
        request_id="me",
        num_prompt_tokens=30,
        notes=tuple(notes),
        steps=tuple(steps),
        report=report,
        until=end if is_live else None,
        known_tokens=draw(st.integers(0, 30)),
        usual=draw(st.none() | st.just(Usual(steps * 8))),
    )


@given(_lives())
def test_causes_sum_to_the_end_to_end_time(life: Life) -> None:
    """Whatever the history, each moment has one cause: the durations add up, and none is negative."""
    found = account(life)
    end = life.until if life.until is not None else life.notes[-1].time
    expected = end - life.notes[0].time
    if life.report is not None:
        expected = expected if life.until is not None else life.report.finished_s
        expected += life.report.submitted_s

    assert all(cause.seconds > 0 for cause in found.causes)
    assert found.total_s == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(found.total_s, rel=1e-9, abs=1e-9)
    assert as_json(found)["total_s"] == found.total_s
    assert page(found).startswith("me: ")


def _steps(begin: float, count: int, *, forward_s: float = 0.01, first: int = 0, **changes: object) -> list[Step]:
    """Decode steps of the request, one after the other."""
    return [
        dataclasses.replace(
            Step(
                worker_id="w",
                number=first + index,
                planned=begin + index * forward_s,
                answered=begin + (index + 1) * forward_s,
                started=begin + index * forward_s,
                forward_s=forward_s,
                decodes=frozenset({ME}),
            ),
            **changes,  # type: ignore[arg-type]
        )
        for index in range(count)
    ]


_USUAL = Usual(_steps(0.0, 20))
_CROWD = frozenset({ME, OTHER, *(StreamKey(b"front/2", stream) for stream in range(38))})
_CROWDED = _steps(1.0, 20, forward_s=0.1, decodes=_CROWD)


def _life(notes: list[Note], steps: list[Step], **fields: object) -> Life:
    changes = {"usual": _USUAL, "num_prompt_tokens": 100} | fields
    return Life(key=ME, request_id="me", notes=tuple(notes), steps=tuple(steps), **changes)  # type: ignore[arg-type]


_HOLDING = Holding(OTHER, "", "w", since=-1.0, until=3.0, num_tokens=100)


def _waiting(reason: WaitReason) -> Life:
    notes = [
        _note(0.0, NoteKind.ARRIVED),
        *([_note(0.1, NoteKind.WAITS, reason.value)] if reason is not WaitReason.TURN else []),
        _note(2.0, NoteKind.ADMITTED),
        _note(2.2, NoteKind.ENDED),
    ]
    return _life(
        notes, _steps(2.0, 20), went_first=(Passing(OTHER, 1.0, is_later=False),), holdings=(_HOLDING,), stalls=()
    )


def _queued(reason: WaitReason) -> Life:
    """Another request was noted as first in the queue; this one only waits for its turn."""
    return dataclasses.replace(_waiting(WaitReason.TURN), obstacles=(Obstacle(-1.0, "w", reason),))


def _thrown_out(kind: NoteKind) -> Life:
    notes = [
        _note(0.0, NoteKind.ARRIVED),
        _note(0.0, NoteKind.ADMITTED),
        _note(0.2, kind, by=OTHER),
        _note(1.2, NoteKind.ADMITTED),
        _note(2.4, NoteKind.ENDED),
    ]
    again = Step(worker_id="w", number=30, planned=1.2, answered=2.2, started=1.2, forward_s=1.0, chunks={ME: 120})
    return _life(notes, [*_steps(0.0, 20), again, *_steps(2.2, 20, first=40)])


def _running(*steps: Step, **fields: object) -> Life:
    end = max(step.answered for step in steps)
    notes = [_note(0.0, NoteKind.ARRIVED), _note(0.0, NoteKind.ADMITTED), _note(end, NoteKind.ENDED)]
    return _life(notes, list(steps), **fields)


def _prompt(chunks: dict[StreamKey, int], seconds: float = 1.0) -> Step:
    return Step(worker_id="w", number=9, planned=0.0, answered=seconds, started=0.0, forward_s=seconds, chunks=chunks)


def _held(reason: WaitReason) -> Life:
    notes = [
        _note(0.0, NoteKind.ARRIVED),
        _note(0.0, NoteKind.ADMITTED),
        _note(0.2, NoteKind.HELD, reason.value),
        _note(2.4, NoteKind.ENDED),
    ]
    others = _steps(0.2, 40, forward_s=0.05, first=50, decodes=frozenset({OTHER}))
    return _life(notes, [*_steps(0.0, 20), *others, *_steps(2.2, 20, first=100)])


def _reported(**durations: float) -> Life:
    report = Report(**({"submitted_s": 0.01, "ended_s": 0.2, "finished_s": 0.2} | durations))
    return dataclasses.replace(_running(*_steps(0.0, 20)), report=report)


_PLANTED = {
    CauseKind.QUEUE: _waiting(WaitReason.TURN),
    CauseKind.MEMORY: _waiting(WaitReason.MEMORY),
    CauseKind.ROWS: _waiting(WaitReason.ROWS),
    CauseKind.TENANT: _waiting(WaitReason.TENANT_LIMIT),
    CauseKind.SESSION: _waiting(WaitReason.SESSION),
    CauseKind.GRAMMAR: _waiting(WaitReason.GRAMMAR),
    CauseKind.PREFIX: _waiting(WaitReason.PREFIX),
    CauseKind.BOUNDARY: _waiting(WaitReason.BOUNDARY),
    CauseKind.PREFIX_COPY: _waiting(WaitReason.COPY),
    CauseKind.PREFIX_READ: _waiting(WaitReason.DISK),
    CauseKind.BATCH: _waiting(WaitReason.BATCH),
    CauseKind.NO_WORKER: _waiting(WaitReason.NO_WORKER),
    CauseKind.ALONE: _waiting(WaitReason.ALONE),
    CauseKind.PLACEMENT: _waiting(WaitReason.ELSEWHERE),
    CauseKind.PREEMPTED: _thrown_out(NoteKind.PREEMPTED),
    CauseKind.SWAPPED: _thrown_out(NoteKind.SWAPPED),
    CauseKind.WORKER_LOST: _thrown_out(NoteKind.LOST),
    CauseKind.WORKER_SILENT: _thrown_out(NoteKind.SILENT),
    CauseKind.SUBMITTED_AGAIN: _thrown_out(NoteKind.SUBMITTED_AGAIN),
    CauseKind.SCHEDULER_STALLED: dataclasses.replace(_waiting(WaitReason.ROWS), stalls=((0.2, 1.9),)),
    CauseKind.REFUSED: _life([_note(0.0, NoteKind.ARRIVED), _note(0.1, NoteKind.ENDED)], [], end="tenant_limit"),
    CauseKind.BUDGET: _queued(WaitReason.BUDGET),
    CauseKind.ORDER: dataclasses.replace(
        _queued(WaitReason.ROWS), went_first=(Passing(OTHER, 0.3, is_later=True),), policy="sjf"
    ),
    CauseKind.NEIGHBOURS: _running(
        *_steps(0.0, 40, forward_s=0.1, decodes=_CROWD), usual=Usual([*_steps(0, 20), *_CROWDED])
    ),
    CauseKind.MOVED: _thrown_out(NoteKind.MOVED),
    CauseKind.PREFIX_FAILED: _thrown_out(NoteKind.PREFIX_FAILED),
    CauseKind.OTHER_PROMPTS: _running(*_steps(0.0, 5, forward_s=0.5, chunks={OTHER: 50})),
    CauseKind.OWN_PREFILL: _running(_prompt({ME: 100, OTHER: 20}), *_steps(1.0, 20)),
    CauseKind.COLD_PREFIX: _running(_prompt({ME: 100}), *_steps(1.0, 20), known_tokens=96, known_by=OTHER),
    CauseKind.UNUSABLE_PREFIX: _running(
        _prompt({ME: 100}), *_steps(1.0, 20), known_tokens=96, known_by=OTHER, num_unusable_tokens=80
    ),
    CauseKind.OWN_DECODE: _running(*_steps(0.0, 200)),
    CauseKind.SLOW_WORKER: _running(*_steps(0.0, 20, forward_s=0.1)),
    CauseKind.STEP_BEFORE: _running(
        *_steps(0.0, 1, forward_s=2.0, decodes=frozenset({OTHER})), *_steps(2.0, 20, first=5)
    ),
    CauseKind.SAMPLING: _running(*_steps(0.0, 20, forward_s=0.05, sample_s=0.09), usual=None),
    CauseKind.HELD_CREDIT: _held(WaitReason.CREDIT),
    CauseKind.HELD_MEMORY: _held(WaitReason.MEMORY),
    CauseKind.TOKENISING: _reported(submitted_s=1.0, tokenise_s=0.9),
    CauseKind.GRAMMAR_CHECK: _reported(submitted_s=1.0, grammar_s=0.9),
    CauseKind.LINK: _reported(ended_s=1.0, finished_s=1.0),
    CauseKind.DETOKENISING: _reported(finished_s=1.0, detokenise_s=0.7),
    CauseKind.CLIENT: _reported(finished_s=1.0, client_s=0.7),
    CauseKind.FRONT_END: _reported(submitted_s=1.0),
}


@pytest.mark.parametrize("kind", _PLANTED, ids=lambda kind: kind.name.lower())
def test_a_planted_cause_is_named_first(kind: CauseKind) -> None:
    """The cause with the most time comes first in the list, and the advice refers to it."""
    found = account(_PLANTED[kind])

    assert found.causes[0].kind is kind, page(found)
    assert kind.value in page(found)
    assert bool(advice(found)) == (kind not in (CauseKind.PREFIX, CauseKind.BOUNDARY))


@pytest.mark.parametrize(
    ("link_s", "prefill_s", "advised"),
    [
        (0.06, 0.01, "time passed between processes"),  # more than the link needs
        (0.015, 0.01, "its own prompt takes this long"),
        (0.015, 0.001, ""),
    ],
)
def test_a_short_link_does_not_hide_the_next_cause(link_s: float, prefill_s: float, advised: str) -> None:
    """The link gets the advice if it took long, else the largest other cause, if that is worth an advice."""
    life = _running(*_steps(0.0, 20))
    causes = (Cause(CauseKind.LINK, link_s), Cause(CauseKind.OWN_PREFILL, prefill_s))
    found = Account(life, causes, link_s + prefill_s, None, None)

    assert advice(found).startswith(advised)
    assert bool(advice(found)) == bool(advised)
    assert ("No setting would have made it faster." in page(found)) == (not advised)


def test_requests_that_took_part_are_named() -> None:
    """The preempting request, the owner of the prompt in the steps, and the overtaking request are named by id."""
    for kind in (
        CauseKind.PREEMPTED,
        CauseKind.OTHER_PROMPTS,
        CauseKind.ROWS,
        CauseKind.MEMORY,
        CauseKind.TENANT,
        CauseKind.ORDER,
        CauseKind.NEIGHBOURS,
        CauseKind.COLD_PREFIX,
    ):
        life = dataclasses.replace(_PLANTED[kind], names={OTHER: "the-other"})
        first = account(life).causes[0]
        assert OTHER in first.by, kind
        assert "the-other" in page(account(life)), kind


@pytest.mark.parametrize(("known_tokens", "kind"), [(96, CauseKind.PREFIX), (32, CauseKind.BUDGET)])
def test_a_wait_for_room_behind_the_own_prefix_is_a_wait_for_the_prefix(known_tokens: int, kind: CauseKind) -> None:
    """If most of the prompt that fills the steps is the request's own prompt, more room in steps would not help."""
    life = _queued(WaitReason.BUDGET)
    steps = (_prompt({OTHER: 2048}), *life.steps)

    first = account(dataclasses.replace(life, steps=steps, known_by=OTHER, known_tokens=known_tokens)).causes[0]

    assert first.kind is kind
    assert set(first.by) == {OTHER}


def test_holders_of_the_memory_are_named_for_a_request_that_lacked_it_itself() -> None:
    """A request that cannot grow and ranks last is preempted for itself; it does not hold the memory that it lacks."""
    notes = [
        _note(0.0, NoteKind.ARRIVED),
        _note(0.0, NoteKind.ADMITTED),
        _note(0.2, NoteKind.PREEMPTED, by=ME),
        _note(2.0, NoteKind.ADMITTED),
        _note(2.2, NoteKind.ENDED),
    ]
    life = _life(notes, [*_steps(0.0, 20), *_steps(2.0, 20, first=40)], holdings=(_HOLDING,))

    first = account(life).causes[0]

    assert first.kind is CauseKind.PREEMPTED
    assert set(first.by) == {OTHER}


def test_the_worst_step_is_the_one_that_was_waited_for_longest() -> None:
    """The worst step has its neighbours with the tokens of their prompts, most first."""
    slow = dataclasses.replace(_prompt({OTHER: 64}, 0.6), decodes=frozenset({ME, StreamKey(b"front/1", 3)}))
    found = account(_running(slow, *_steps(0.6, 20)))

    assert found.worst is not None
    assert found.worst.step is slow
    assert found.worst.neighbours == ((OTHER, 64), (StreamKey(b"front/1", 3), 1))


def test_every_cause_has_advice_and_its_settings_exist() -> None:
    """Advice names settings that the command line has."""
    settings = {
        field.name.replace("_", "-")
        for config in (SchedulerConfig, WorkerConfig, FrontendConfig, ServiceConfig)
        for field in dataclasses.fields(config)
    } | {"move"}

    assert set(_ADVICE) == set(CauseKind)
    named = {name for text in _ADVICE.values() for name in re.findall(r"--([\w-]+)", text)}
    assert named <= settings


def test_causes_that_would_be_printed_as_no_time_are_left_out() -> None:
    """A page has no rows of 0.0 ms, unless there is nothing else to show."""
    found = account(_PLANTED[CauseKind.OTHER_PROMPTS])
    short = [dataclasses.replace(cause, seconds=0.00004) for cause in found.causes]

    some = page(dataclasses.replace(found, causes=(found.causes[0], *short[1:])))
    none = page(dataclasses.replace(found, causes=tuple(short)))

    assert len(found.causes) > 1
    assert (some.count("#  "), none.count("  0.0 ms")) == (1, len(short))


def test_choices_of_one_request_are_named_once() -> None:
    """A neighbour with several choices under one name is named once, with their number."""
    choices = [StreamKey(OTHER.frontend, OTHER.stream + number) for number in range(4)]
    chunks = dict.fromkeys(choices, 5)
    steps = [dataclasses.replace(step, chunks=chunks) for step in _PLANTED[CauseKind.OTHER_PROMPTS].steps]
    names = dict.fromkeys(choices, "the-other")
    life = dataclasses.replace(_PLANTED[CauseKind.OTHER_PROMPTS], steps=tuple(steps), names=names)
    text = page(account(life))

    assert "requests: the-other (4 choices)\n" in text
    assert "  with the-other (5 prompt tokens) (4 choices)\n" in text
