"""All promises, called in order."""

from collections.abc import Callable
from typing import Any

from checks.sim.clients import Clients
from checks.sim.cluster import Cluster
from checks.sim.coverage import Limit
from checks.sim.promises.admissions import AdmissionsAreSound, PrefixesAreShared, RowsLeave
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.blame import Suspects
from checks.sim.promises.book import Book
from checks.sim.promises.drains import DrainsMoveWhatHasRoom
from checks.sim.promises.effort import WorkPerPlan
from checks.sim.promises.eligible import Eligibility
from checks.sim.promises.ends import EndsAreJustified
from checks.sim.promises.evictions import LeastRecentlyUsedGoFirst
from checks.sim.promises.fairness import ServiceIsShared
from checks.sim.promises.limits import AttentionIsCounted, StepLimits, TargetIsKept
from checks.sim.promises.order import AdmissionOrder
from checks.sim.promises.passing import PassedOverSeldom, TargetsGoFirst
from checks.sim.promises.prompts import PromptsAreShared, ShortPromptsStart
from checks.sim.promises.queues import QueueLimits
from checks.sim.promises.quotas import Quotas
from checks.sim.promises.refusals import RefusalsAreNeeded
from checks.sim.promises.sessions import OnlyNewSessionsWait
from checks.sim.promises.sizes import MemoryIsBounded
from checks.sim.promises.victims import VictimsRankLast
from checks.sim.promises.waits import UnusableGrammarsEnd, WaitsAreBounded
from checks.sim.promises.work import RowsGoOn, WorkConservation
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from checks.sim.world import World
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.scheduler import Scheduler


class Promises:
    """Checks the promises of one core from its start on."""

    def __init__(self, world: World, cluster: Cluster, clients: Clients, core: Scheduler) -> None:
        self._clients = clients
        self._world = world
        self._book = Book(world)
        watched = Watched(world, cluster, clients, self._book, core.stats, core.tables, core)
        self._ends = EndsAreJustified(watched)
        promises: list[Promise] = [
            self._ends,
            StepLimits(watched),
            AttentionIsCounted(watched),
            TargetIsKept(watched),
            RowsLeave(watched),
            AdmissionsAreSound(watched),
            PrefixesAreShared(watched),
            UnusableGrammarsEnd(watched),
            MemoryIsBounded(watched),
            LeastRecentlyUsedGoFirst(watched),
        ]
        if self._book.is_complete:
            quotas, suspects = Quotas(watched), Suspects(watched)
            eligibility = Eligibility(watched, quotas, suspects)
            promises += [
                eligibility,
                WaitsAreBounded(watched),
                OnlyNewSessionsWait(watched),
                QueueLimits(watched),
                quotas,
                suspects,
                PromptsAreShared(watched, suspects),
                ShortPromptsStart(watched, eligibility),
                RowsGoOn(watched, suspects),
                AdmissionOrder(watched, eligibility),
                WorkConservation(watched, eligibility),
                DrainsMoveWhatHasRoom(watched),
                ServiceIsShared(watched, eligibility),
                TargetsGoFirst(watched, eligibility),
                PassedOverSeldom(watched, eligibility),
                VictimsRankLast(watched, eligibility),
                RefusalsAreNeeded(watched, quotas),
                WorkPerPlan(watched),
            ]
        # Skip hooks that a promise does not override, because every hook is called for every event or plan.
        self._before = _hooks(promises, "before")
        self._objections = _hooks(promises, "objection")
        self._displaced = _hooks(promises, "displaced")
        self._ended = _hooks(promises, "ended")
        self._after = _hooks(promises, "after")
        self._asked = _hooks(promises, "asked")
        self._admitted = _hooks(promises, "admitted")
        self._plan_made = _hooks(promises, "plan_made")
        self._no_plan = _hooks(promises, "no_plan")
        self._at_rest = _hooks(promises, "at_rest")

    def shutting_down(self) -> None:
        """Handle that the core is about to be asked to end every request."""
        self._ends.shutting_down = True

    def before(self, event: ev.Event) -> None:
        """Handle an event that the core is about to get."""
        for hook in self._before:
            hook(event)

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        """Return what contradicts an end reason, as far as this depends on more than the stream."""
        for hook in self._objections:
            objection: str | None = hook(stream, reason)
            if objection is not None:
                return objection
        return None

    def attempt_ended(self, effect: ef.AttemptEnded) -> None:
        """Handle a traced request that left its worker."""
        stream = self._clients.live.get(StreamName(effect.frontend, effect.stream))
        if stream is None:
            raise ViolationError("attempt.unknown", f"{effect.outcome} of stream {effect.stream}, which is not live")
        epoch = self._book.left(stream, effect.outcome)
        if epoch is None:
            return
        if effect.outcome == "preempted":
            self._preempted(stream)
        for hook in self._displaced:
            hook(stream, epoch, effect.outcome)

    def _preempted(self, stream: Stream) -> None:
        """Check that no request is preempted if capacity is guaranteed, nor twice without a new token in between."""
        self._world.coverage.limit(Limit.MEMORY)
        if self._world.scenario.config.capacity == "guaranteed_no_evict":
            raise ViolationError("capacity.guaranteed", "preempted", stream.name)
        if stream.preempted_at == len(stream.tokens):
            self._world.broken("preempt.progress", f"twice at {len(stream.tokens)} tokens", stream.name)
        stream.preempted_at = len(stream.tokens)

    def ended(self, stream: Stream) -> None:
        """Handle a stream that is over."""
        for hook in self._ended:
            hook(stream)
        self._book.ended(stream)

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        """Handle an event that the core has handled, after its effects were executed."""
        if isinstance(event, ev.RequestArrived):
            stream = self._clients.live.get(StreamName(event.frontend, event.stream))
            if stream is not None and not self._book.knows(stream):
                self._book.arrived(stream)
        for hook in self._after:
            hook(event, effects)

    def asked(self, epoch: Epoch) -> None:
        """Handle that the core is about to be asked for a plan."""
        for hook in self._asked:
            hook(epoch)

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        """Handle a plan that the model worker has executed."""
        for admission in plan.admissions:
            name = StreamName(admission.frontend, admission.stream)
            stream = self._clients.live.get(name)
            if stream is None:
                raise ViolationError("plan.admission", "the request is not live", name)
            self._book.admitted(stream, epoch, (admission.row, admission.generation))
            for hook in self._admitted:
                hook(stream, admission, plan, epoch)
        for hook in self._plan_made:
            hook(plan, epoch)

    def no_plan(self, epoch: Epoch) -> None:
        """Handle that the core made no plan for a worker that has no step in flight."""
        for hook in self._no_plan:
            hook(epoch)

    def at_rest(self) -> None:
        """Handle that everything has ended, and nothing is in flight."""
        for hook in self._at_rest:
            hook()


def _hooks(promises: list[Promise], name: str) -> list[Callable[..., Any]]:
    """Return the methods with this name that promises override."""
    own = getattr(Promise, name)
    return [getattr(promise, name) for promise in promises if getattr(type(promise), name) is not own]
