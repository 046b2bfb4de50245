"""The worker's side of the plan protocol, frame by frame."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.frames import PLAN_VERSIONS
from tests.worker_svc.values import LIMITS
from worker_svc.link.session import (
    WELCOME_TIMEOUT_S,
    Event,
    Lost,
    Malformed,
    PlanArrived,
    RefusedForGood,
    Session,
    Welcomed,
)

EPOCH = 77


def frame(*, epoch: int = EPOCH, **body: object) -> bytes:
    """A SchedulerMessage on the wire."""
    return plan_pb2.SchedulerMessage(epoch=epoch, **body).SerializeToString()  # type: ignore[arg-type]


WELCOME = frame(welcome=plan_pb2.Welcome(max_in_flight=2, silence_ms=500))


def plan(step: int, *, epoch: int = EPOCH, leaves: bytes = b"") -> bytes:
    """A plan without work on the wire."""
    return frame(epoch=epoch, plan=plan_pb2.Plan(step=step, leaves=leaves))


def opened() -> Session:
    """A session that was welcomed at time 0."""
    session = Session(0.0, LIMITS)
    session.receive(WELCOME, 0.0)
    return session


def outcome(session: Session, *frames: bytes) -> Event | None:
    """What the last frame means."""
    return [session.receive(each, 0.0) for each in frames][-1]


def test_welcome_opens_the_epoch() -> None:
    """After Welcome, plans 1, 2, 3 of that epoch are taken as they are answered."""
    session = Session(0.0, LIMITS)

    assert outcome(session, WELCOME) == Welcomed(EPOCH, 2, PLAN_VERSIONS.oldest)
    for step in (1, 2, 3):
        event = outcome(session, plan(step))
        assert isinstance(event, PlanArrived)
        assert event.plan.step == step
        session.answered()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([plan(2)], "received plan 2, expected 1"),
        ([plan(1), plan(1)], "received plan 1, expected 2"),
        ([plan(1), plan(2), plan(3)], "received more than 2 plans in flight"),
        ([plan(1, leaves=to_column([4]))], "invalid plan 1: leave: a row is outside [0, 4)"),
        ([WELCOME], "received a second Welcome"),
        ([frame(epoch=0, unknown=plan_pb2.Unknown())], "does not know"),
    ],
)
def test_a_surprise_ends_the_session(frames: list[bytes], reason: str) -> None:
    """A gap, a repetition, too many plans, an invalid plan, a second Welcome and Unknown lead to a new Hello."""
    event = outcome(opened(), *frames)

    assert isinstance(event, Lost)
    assert reason in event.reason


def test_messages_of_another_epoch_do_nothing() -> None:
    """They are dropped, and do not count as a sign of life."""
    session = opened()

    assert session.receive(plan(1, epoch=EPOCH + 1), 0.4) is None
    for epoch in (EPOCH - 1, 0):
        assert session.receive(frame(epoch=epoch, ping=plan_pb2.Ping()), 0.4) is None
    assert session.overdue(0.6) is not None
    assert isinstance(outcome(session, plan(1)), PlanArrived)


def test_silence_ends_the_session_and_a_ping_prolongs_it() -> None:
    """The worker waits for Welcome for a fixed time, then for as long as Welcome says after each message."""
    waiting = Session(10.0, LIMITS)
    assert waiting.overdue(10.0 + WELCOME_TIMEOUT_S) is None
    assert waiting.overdue(10.1 + WELCOME_TIMEOUT_S) == Lost("the scheduler did not answer Hello")

    session = opened()
    assert session.overdue(0.5) is None
    assert session.overdue(0.6) == Lost("no message from the scheduler for 0.5 s")
    assert session.receive(frame(ping=plan_pb2.Ping()), 0.5) is None
    assert session.overdue(0.9) is None


def test_a_refusal_is_final_and_one_line() -> None:
    """The scheduler's reason reaches the operator as one line."""
    event = outcome(Session(0.0, LIMITS), frame(epoch=0, refused=plan_pb2.Refused(reason="another\nmodel")))

    assert event == RefusedForGood("another model")


def test_the_scheduler_picks_the_version() -> None:
    """What Welcome names is spoken in its epoch; a scheduler from before such choices speaks our oldest."""
    named = frame(welcome=plan_pb2.Welcome(max_in_flight=2, silence_ms=500, protocol_version=PLAN_VERSIONS.newest))

    assert outcome(Session(0.0, LIMITS), named) == Welcomed(EPOCH, 2, PLAN_VERSIONS.newest)
    assert outcome(Session(0.0, LIMITS), WELCOME) == Welcomed(EPOCH, 2, PLAN_VERSIONS.oldest)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xff\xff",
        b"hello",
        frame(),
        frame(epoch=0, welcome=plan_pb2.Welcome(max_in_flight=2, silence_ms=500)),
        frame(welcome=plan_pb2.Welcome(max_in_flight=0, silence_ms=500)),
        frame(welcome=plan_pb2.Welcome(max_in_flight=2)),
        frame(welcome=plan_pb2.Welcome(max_in_flight=2, silence_ms=500, protocol_version=PLAN_VERSIONS.newest + 1)),
    ],
)
def test_a_malformed_frame_changes_nothing(junk: bytes) -> None:
    """It is named as such, and the session goes on as if it had not come."""
    session = Session(0.0, LIMITS)

    assert isinstance(session.receive(junk, 0.0), Malformed)
    assert outcome(session, WELCOME) == Welcomed(EPOCH, 2, PLAN_VERSIONS.oldest)


@given(st.binary(max_size=200))
def test_no_bytes_make_a_session_raise(junk: bytes) -> None:
    """Whatever a peer sends, the answer is an event."""
    opened().receive(junk, 0.0)
    Session(0.0, LIMITS).receive(junk, 0.0)


@given(position=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_no_damaged_plan_makes_a_session_raise(position: int, value: int, cut: int) -> None:
    """A flipped byte or a missing tail of a real plan gives an event, never an exception."""
    admission = plan_pb2.Admission(row=1, generation=1, token_ids=to_column(range(9)), request_id="request-ä")
    real = frame(plan=plan_pb2.Plan(step=1, admissions=[admission], chunk_rows=to_column([1])))
    damaged = bytearray(real)
    damaged[position % len(damaged)] = value

    opened().receive(bytes(damaged), 0.0)
    opened().receive(real[: cut % len(real)], 0.0)
