"""What the frames of one incarnation mean: the worker's side of the plan protocol, without socket and clock.

A session begins with a Hello and ends with the next one. It waits for Welcome, then takes plans of that epoch in order.
Whatever breaks the order (a gap, a surprise, Unknown, silence) ends it: `Lost`. Frames that are no message of the
protocol are `Malformed` and harm nobody; messages of another epoch are dropped on sight and prove nothing, not even
that the scheduler lives.

    waiting ──Welcome──► open ──Plan 1, 2, 3 …──► open
       │                  │
       └─ silence ────────┴─ gap, surprise, Unknown, silence ──► Lost
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_VERSIONS

WELCOME_TIMEOUT_S = 2.0
"""How long a Hello waits for its Welcome."""


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The epoch is open."""

    epoch: int
    max_in_flight: int
    protocol_version: int
    """What is spoken in it."""


@dataclass(frozen=True, slots=True)
class PlanArrived:
    """The next plan of the epoch."""

    plan: plan_pb2.Plan


@dataclass(frozen=True, slots=True)
class GrammarRequested:
    """A grammar is to be compiled."""

    request: plan_pb2.PrepareGrammar


@dataclass(frozen=True, slots=True)
class LogLevelWanted:
    """How much the operator wants logged."""

    level: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Drop all rows and say Hello again."""

    reason: str


@dataclass(frozen=True, slots=True)
class RefusedForGood:
    """Exit with the scheduler's reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A frame that is no message of the protocol."""

    reason: str


Event = Welcomed | PlanArrived | GrammarRequested | LogLevelWanted | Lost | RefusedForGood | Malformed


class Session:
    """The conversation of one incarnation. Times are seconds of any monotonic clock."""

    def __init__(self, now: float) -> None:
        self._heard = now
        self._silence = WELCOME_TIMEOUT_S
        self._max_in_flight = 0
        self._unanswered = 0
        self._next_step = 1
        self.epoch = 0
        """0 until Welcome."""

    def overdue(self, now: float) -> Lost | None:
        """The end of the session if the scheduler was silent for too long."""
        if now - self._heard <= self._silence:
            return None
        return Lost("no Welcome" if self.epoch == 0 else f"silence for {self._silence:g} s")

    def answered(self) -> None:
        """One plan was answered."""
        self._unanswered -= 1

    def receive(self, frame: bytes, now: float) -> Event | None:
        """What a frame means; None when there is nothing to do."""
        try:
            message = plan_pb2.SchedulerMessage.FromString(frame)
        except DecodeError:
            return Malformed("not a SchedulerMessage")
        match message.WhichOneof("body"):
            case None:
                return Malformed("a SchedulerMessage that says nothing")
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
                return self._plan(message.plan)
            case "prepare_grammar":
                return GrammarRequested(message.prepare_grammar)
            case "ping" if message.ping.log_level:
                return LogLevelWanted(message.ping.log_level)
        return None

    def _welcome(self, message: plan_pb2.SchedulerMessage, now: float) -> Event:
        if self.epoch:
            return Lost("a second Welcome")
        welcome = message.welcome
        if message.epoch == 0 or welcome.max_in_flight == 0 or welcome.silence_ms == 0:
            return Malformed("a Welcome without epoch, plans in flight or time of silence")
        version = welcome.protocol_version or PLAN_VERSIONS.oldest
        if not PLAN_VERSIONS.oldest <= version <= PLAN_VERSIONS.newest:
            return Malformed(f"a Welcome to version {version} of the plan protocol, which was not offered")
        self.epoch = message.epoch
        self._heard = now
        self._silence = welcome.silence_ms / 1000
        self._max_in_flight = welcome.max_in_flight
        return Welcomed(self.epoch, welcome.max_in_flight, version)

    def _plan(self, plan: plan_pb2.Plan) -> Event:
        if plan.step != self._next_step:
            return Lost(f"plan {plan.step} instead of {self._next_step}")
        if self._unanswered >= self._max_in_flight:
            return Lost(f"more than {self._max_in_flight} plans in flight")
        self._next_step += 1
        self._unanswered += 1
        return PlanArrived(plan)
