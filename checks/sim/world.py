"""The state that all parts of one simulation share."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from checks.sim.agenda import Agenda
from checks.sim.coverage import Coverage
from checks.sim.faults import Fault, FaultRates
from checks.sim.gaps import KNOWN
from checks.sim.scenario import Scenario
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev


@dataclass(slots=True)
class World:
    """Random numbers, virtual time, the entry point of the core, and the counts."""

    scenario: Scenario
    rng: random.Random
    agenda: Agenda
    coverage: Coverage
    feed: Callable[[ev.Event], list[ef.Effect]]
    """Pass an event to the core and execute its effects; not reentrant."""
    faults: FaultRates
    """Faults in the present phase."""
    healed: bool = False
    stalled_s: float = 0.0
    """Time for which the scheduler has stalled so far."""

    @property
    def now(self) -> float:
        """The virtual time."""
        return self.agenda.now

    def latency(self) -> float:
        """Draw the latency from one process to another."""
        return self.scenario.pace.latency * (0.5 + self.rng.random())

    def broken(self, check: str, detail: str, stream: StreamName | None = None) -> None:
        """Handle a broken promise: count it if it is a known gap, raise it otherwise."""
        if check not in KNOWN:
            raise ViolationError(check, detail, stream)
        self.coverage.counts["known gap", check] += 1

    def fault(self, fault: Fault) -> None:
        """Count a fault."""
        self.coverage.fault(fault)
