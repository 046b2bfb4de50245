"""Worker side of the plan protocol for one incarnation, without socket and clock.

A session begins with a Hello and ends with the next Hello. It waits for Welcome, then decodes this epoch's plans in
order. A gap, an invalid plan, an unexpected message, Unknown or a timeout ends the session with `Lost`. A malformed
frame is dropped and reported as `Malformed`. Messages from another epoch are dropped, and do not count as a sign of
life.

    waiting ──Welcome──► open ──Plan 1, 2, 3 …──► open
       │                  │
       └─ timeout ────────┴─ gap, invalid plan, unexpected message, Unknown, timeout ──► Lost
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_VERSIONS
from worker_svc.interface.disk import DiskJob
from worker_svc.interface.errors import PlanError
from worker_svc.interface.grammar import GrammarRequest
from worker_svc.interface.limits import Limits
from worker_svc.interface.plan import Plan
from worker_svc.link.decoding import decode_disk_job, decode_grammar_request, decode_plan

WELCOME_TIMEOUT_S = 2.0
"""Timeout from Hello to Welcome."""


class HelloReason(enum.Enum):
    """Reason why a worker sends Hello."""

    STARTED = enum.auto()
    SESSION_LOST = enum.auto()
    PROTOCOL_ERROR = enum.auto()
    STEP_FAILED = enum.auto()


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The scheduler accepted the worker and opened an epoch."""

    epoch: int
    max_in_flight: int
    protocol_version: int
    """Protocol version of the epoch."""


@dataclass(frozen=True, slots=True)
class PlanArrived:
    """The next plan of the epoch."""

    plan: Plan
    frame: bytes
    """The frame that contains it."""


@dataclass(frozen=True, slots=True)
class GrammarRequested:
    """The scheduler asks for a grammar to be compiled."""

    request: GrammarRequest


@dataclass(frozen=True, slots=True)
class DiskJobArrived:
    """The scheduler asks for copies between host memory and disk."""

    job: DiskJob


@dataclass(frozen=True, slots=True)
class LogLevelWanted:
    """The operator set the log level."""

    level: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The session has ended; the worker must drop all rows and send a new Hello."""

    reason: str
    """For the log."""
    hello_reason: HelloReason = HelloReason.SESSION_LOST
    """For the scheduler."""


@dataclass(frozen=True, slots=True)
class RefusedForGood:
    """The scheduler refused this worker, which must exit with the scheduler's reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A frame that is not a valid message of the protocol."""

    reason: str


Event = Welcomed | PlanArrived | GrammarRequested | DiskJobArrived | LogLevelWanted | Lost | RefusedForGood | Malformed


class Session:
    """One incarnation's protocol state. Times are seconds of any monotonic clock."""

    def __init__(
        self,
        now: float,
        limits: Limits,
        *,
        accepts: Callable[[int], bool] = lambda _leader_number: True,
    ) -> None:
        """Start to wait for Welcome.

        Args:
            now: the time.
            limits: the worker's limits.
            accepts: returns whether a scheduler with this leader number may lead.
        """
        self._limits = limits
        self._accepts = accepts
        self._heard = now
        self._silence = WELCOME_TIMEOUT_S
        self._max_in_flight = 0
        self._unanswered = 0
        self._next_step = 1
        self.epoch = 0
        """Epoch of the messages; 0 before Welcome."""

    def overdue(self, now: float) -> Lost | None:
        """Return `Lost` if no message from the scheduler has arrived for too long."""
        if now - self._heard <= self._silence:
            return None
        return Lost(
            "the scheduler did not answer Hello"
            if self.epoch == 0
            else f"no message from the scheduler for {self._silence:g} s"
        )

    def answered(self) -> None:
        """Record that the result of a plan was sent."""
        self._unanswered -= 1

    def receive(self, frame: bytes, now: float) -> Event | None:
        """Return a frame's event; None if it needs no action."""
        try:
            message = plan_pb2.SchedulerMessage.FromString(frame)
        except DecodeError:
            return Malformed("the frame is not a SchedulerMessage")
        match message.WhichOneof("body"):
            case None:
                return Malformed("a SchedulerMessage has no body")
            case "unknown":
                return Lost("the scheduler does not know this worker")
            case "refused":
                return RefusedForGood(" ".join(message.refused.reason.split()) or "no reason given")
            case "welcome":
                return self._welcome(message, now)
        if self.epoch == 0 or message.epoch != self.epoch:
            return None
        self._heard = now
        match message.WhichOneof("body"):
            case "plan":
                return self._plan(message.plan, frame)
            case "prepare_grammar":
                return GrammarRequested(decode_grammar_request(message.prepare_grammar))
            case "disk_job":
                try:
                    return DiskJobArrived(decode_disk_job(message.disk_job, self._limits))
                except PlanError as error:
                    return Lost(f"invalid disk job: {error}", HelloReason.PROTOCOL_ERROR)
            case "ping" if message.ping.log_level:
                return LogLevelWanted(message.ping.log_level)
        return None

    def _welcome(self, message: plan_pb2.SchedulerMessage, now: float) -> Event:
        if self.epoch:
            return Lost("received a second Welcome", HelloReason.PROTOCOL_ERROR)
        welcome = message.welcome
        if message.epoch == 0 or welcome.max_in_flight == 0 or welcome.silence_ms == 0:
            return Malformed("Welcome: epoch, max_in_flight or silence_ms is 0")
        version = welcome.protocol_version or PLAN_VERSIONS.oldest
        if not PLAN_VERSIONS.oldest <= version <= PLAN_VERSIONS.newest:
            return Malformed(f"Welcome: version {version} of the plan protocol was not offered")
        if not self._accepts(welcome.leader_number):
            return Lost(f"the scheduler with leader number {welcome.leader_number} was replaced")
        self.epoch = message.epoch
        self._heard = now
        self._silence = welcome.silence_ms / 1000
        self._max_in_flight = welcome.max_in_flight
        return Welcomed(self.epoch, welcome.max_in_flight, version)

    def _plan(self, message: plan_pb2.Plan, frame: bytes) -> Event:
        if message.step != self._next_step:
            return Lost(f"received plan {message.step}, expected {self._next_step}", HelloReason.PROTOCOL_ERROR)
        if self._unanswered >= self._max_in_flight:
            return Lost(f"received more than {self._max_in_flight} plans in flight", HelloReason.PROTOCOL_ERROR)
        try:
            plan = decode_plan(message, self._limits)
        except PlanError as error:
            return Lost(f"invalid plan {message.step}: {error}", HelloReason.PROTOCOL_ERROR)
        self._next_step += 1
        self._unanswered += 1
        return PlanArrived(plan, frame)
