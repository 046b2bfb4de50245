"""What all parts of one simulation share."""

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
    """Dice, time, the core's entrance, and the book of what was seen."""

    scenario: Scenario
    rng: random.Random
    agenda: Agenda
    coverage: Coverage
    feed: Callable[[ev.Event], list[ef.Effect]]
    """Hands an event to the core and carries its effects out; never called while it runs."""
    faults: FaultRates
    """Those of the present phase."""
    healed: bool = False

    @property
    def now(self) -> float:
        """Virtual time."""
        return self.agenda.now

    def latency(self) -> float:
        """One way from a process to another."""
        return self.scenario.pace.latency * (0.5 + self.rng.random())

    def broken(self, check: str, detail: str, stream: StreamName | None = None) -> None:
        """A promise was not kept: counts it if that is known, else fails."""
        if check not in KNOWN:
            raise ViolationError(check, detail, stream)
        self.coverage.counts["known gap", check] += 1

    def fault(self, fault: Fault) -> None:
        """A fault happens."""
        self.coverage.fault(fault)
