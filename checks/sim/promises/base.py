"""The base class for promises. A promise is a guarantee of the core, checked from outside at every event.

A promise is a class whose docstring states the guarantee. It overrides the hooks that it needs and raises a
`ViolationError` when the guarantee is broken. Each core has its own promises; a restarted core gets new ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

from checks.sim.clients import Clients
from checks.sim.cluster import Cluster
from checks.sim.coverage import Limit
from checks.sim.promises.book import Book
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from checks.sim.world import World
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.lifecycle.statistics import SchedulerStats
from scheduler_svc.core.lifecycle.tables import Tables
from scheduler_svc.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Watched:
    """The state that promises examine."""

    world: World
    cluster: Cluster
    clients: Clients
    book: Book
    stats: Callable[[], SchedulerStats]
    """The core's public statistics."""
    tables: Callable[[], Tables]
    """The core's public tables."""
    core: Scheduler
    """The core itself, only to measure its size and effort. No promise calls it."""


class Promise:
    """One guarantee of the core."""

    def __init__(self, watched: Watched) -> None:
        self.world = watched.world
        self.config = watched.world.scenario.config
        self.cluster = watched.cluster
        self.clients = watched.clients
        self.book = watched.book
        self.stats = watched.stats

    def seen(self, limit: Limit) -> None:
        """Count a limit that was reached, as proof that the promise was tested."""
        self.world.coverage.limit(limit)

    # ---------------------------------------------------------------- hooks, in the order of one event

    def before(self, event: ev.Event) -> None:
        """Handle an event that the core is about to get."""

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        """Return the contradiction between the reason of an end and this promise, if any."""
        return None

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        """Handle a traced stream that left its worker and waits again."""

    def ended(self, stream: Stream) -> None:
        """Handle a stream that is over."""

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Handle an event that the core has handled, after its effects were executed."""

    def asked(self, epoch: Epoch) -> None:
        """Handle the moment before the core is asked for a plan."""

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        """Handle an admission of a plan; called before `plan_made`, in the plan's order."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        """Handle a plan that the model worker has executed."""

    def no_plan(self, epoch: Epoch) -> None:
        """Handle that the core made no plan for a worker that has no step in flight."""

    def at_rest(self) -> None:
        """Handle that everything has ended, and nothing is in flight."""
