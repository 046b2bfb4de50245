"""What a promise is: something that the core guarantees, watched from outside as things happen.

A promise is a class whose docstring states the guarantee. It overrides the hooks that it needs and raises a
`ViolationError` when the guarantee is broken. A promise lives as long as one core; a restarted core is watched by new
ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.lifecycle.statistics import SchedulerStats
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.sim.clients import Clients
from scheduler_svc.sim.cluster import Cluster
from scheduler_svc.sim.coverage import Limit
from scheduler_svc.sim.promises.book import Book
from scheduler_svc.sim.sites import Epoch
from scheduler_svc.sim.stream import Stream
from scheduler_svc.sim.world import World


@dataclass(frozen=True, slots=True)
class Watched:
    """What promises look at."""

    world: World
    cluster: Cluster
    clients: Clients
    book: Book
    stats: Callable[[], SchedulerStats]
    """The core's own figures, as it gives them to anybody."""
    core: Scheduler
    """The core itself, for what it remembers and looks at; no promise calls it."""


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
        """A limit was reached: the promise was really tried."""
        self.world.coverage.limit(limit)

    # ---------------------------------------------------------------- hooks, in the order of one event

    def before(self, event: ev.Event) -> None:
        """The core is about to be given an event."""

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        """Returns what contradicts the reason of an end, as far as this promise can tell."""
        return None

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        """A traced stream left its worker and waits again."""

    def ended(self, stream: Stream) -> None:
        """A stream is over."""

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """The core has handled an event, and its effects are carried out."""

    def asked(self, epoch: Epoch) -> None:
        """The core is about to be asked for a plan."""

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        """A plan gave a row to a stream; called before `plan_made`, in the plan's order."""

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        """A plan was executed by the model worker."""

    def no_plan(self, epoch: Epoch) -> None:
        """The core had nothing to do for a worker that has no step in flight."""

    def at_rest(self) -> None:
        """Everything has ended, and nothing is in flight."""
