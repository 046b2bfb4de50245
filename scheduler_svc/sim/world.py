"""The state that all parts of one simulation share."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.sim.agenda import Agenda
from scheduler_svc.sim.coverage import Coverage
from scheduler_svc.sim.faults import Fault, FaultRates
from scheduler_svc.sim.gaps import KNOWN
from scheduler_svc.sim.scenario import Scenario
from scheduler_svc.sim.violation import StreamName, ViolationError


@dataclass(slots=True)
class World:
    """Random numbers, virtual time, the way into the core, and the counts."""

    scenario: Scenario
    rng: random.Random
    agenda: Agenda
    coverage: Coverage
    feed: Callable[[ev.Event], list[ef.Effect]]
    """Gives an event to the core and executes its effects; not reentrant."""
    faults: FaultRates
    """Faults of the present phase."""
    healed: bool = False

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.agenda.now

    def latency(self) -> float:
        """Draw the latency from one process to another."""
        return self.scenario.pace.latency * (0.5 + self.rng.random())

    def broken(self, check: str, detail: str, stream: StreamName | None = None) -> None:
        """Handle a broken promise: count it if it is known, raise it otherwise."""
        if check not in KNOWN:
            raise ViolationError(check, detail, stream)
        self.coverage.counts["known gap", check] += 1

    def fault(self, fault: Fault) -> None:
        """Count a fault."""
        self.coverage.fault(fault)
