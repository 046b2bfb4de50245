"""The kinds of faults, and how often each occurs in one simulation.

Each seed selects its kinds of faults (swarm testing, Groce et al., ISSTA 2012: a random subset finds more than all at
once). It also selects two rates. Faults per step affect the result or its worker. Faults per second affect any process
at any time.
"""

import enum
import random
from dataclasses import dataclass


class Fault(enum.Enum):
    """A kind of fault."""

    # Faults of a step.
    LATE_RESULT = enum.auto()
    LOST_RESULT = enum.auto()
    LOST_PLAN = enum.auto()
    DUPLICATE_RESULT = enum.auto()
    RESULT_AFTER_RECONNECT = enum.auto()
    STALE_EPOCH = enum.auto()
    CRASH = enum.auto()
    SILENT_CRASH = enum.auto()
    FREEZE = enum.auto()
    COMPILING = enum.auto()
    GOODBYE = enum.auto()
    RESTART_RESIZED = enum.auto()
    RESTART_OTHER_MODEL = enum.auto()
    RESTART_IMPOSSIBLE = enum.auto()
    WRONG_ROWS = enum.auto()
    WRONG_STEP = enum.auto()
    WRONG_TOKEN = enum.auto()
    MISSING_TOKEN = enum.auto()
    MISSING_COPY = enum.auto()
    UNKNOWN_FAILURE = enum.auto()
    FAILED_ROW = enum.auto()
    SPOILT_ROW = enum.auto()
    # Faults at any time.
    SCHEDULER_STALL = enum.auto()
    CORE_RESTART = enum.auto()
    SHUTDOWN = enum.auto()
    FRONTEND_LOST = enum.auto()
    IDLE_CRASH = enum.auto()
    UNKNOWN_STREAM = enum.auto()
    UNKNOWN_FRONTEND = enum.auto()
    DRAIN = enum.auto()
    # Faults of a request, see `traffic`.
    CANCEL = enum.auto()
    STOP_STRING = enum.auto()
    SLOW_READER = enum.auto()
    STALLED_READER = enum.auto()
    SUBMITTED_TWICE = enum.auto()
    INVALID_REQUEST = enum.auto()
    # A request that kills every worker that computes it, see `scenario`.
    POISON = enum.auto()


_KINDS = list(Fault)
STEP_FAULTS = _KINDS[: _KINDS.index(Fault.SCHEDULER_STALL)]
TIMED_FAULTS = _KINDS[_KINDS.index(Fault.SCHEDULER_STALL) : _KINDS.index(Fault.CANCEL)]
REQUEST_FAULTS = _KINDS[_KINDS.index(Fault.CANCEL) : _KINDS.index(Fault.POISON)]

_WEIGHTS = {Fault.SPOILT_ROW: 5, Fault.STALE_EPOCH: 3, Fault.WRONG_ROWS: 2}
"""Weights for faults that rarely have an effect; 1 for the others."""


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each fault occurs."""

    of_steps: tuple[Fault, ...]
    per_step: float
    timed: tuple[Fault, ...]
    per_s: float
    of_requests: dict[Fault, float]
    """Probability per request."""


NONE = FaultRates((), 0.0, (), 0.0, {})


def draw_rates(rng: random.Random, step: float) -> FaultRates:
    """Generate the faults for one simulation with steps of about `step` seconds."""
    of_steps = tuple(fault for fault in STEP_FAULTS for _ in range(_WEIGHTS.get(fault, 1)) if rng.random() < 0.4)
    timed = tuple(fault for fault in TIMED_FAULTS if rng.random() < 0.4)
    return FaultRates(
        of_steps=of_steps,
        per_step=10 ** rng.uniform(-3.0, -1.0) if of_steps else 0.0,
        timed=timed,
        per_s=10 ** rng.uniform(-4.5, -2.5) / step if timed else 0.0,
        of_requests={fault: 10 ** rng.uniform(-2.5, -0.5) for fault in REQUEST_FAULTS if rng.random() < 0.6},
    )
