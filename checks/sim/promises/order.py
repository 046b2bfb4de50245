"""The order in which requests are admitted.

A policy orders requests by a key (see `core.queueing.policies`). The simulator knows each key, or two bounds if the key
depends on what the core has learned. A request is *overtaken* when a request with a larger key is admitted while it
waits.
"""

import bisect

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.eligible import Eligibility, Obstacle, assigned_s
from checks.sim.promises.keys import PolicyKeys
from checks.sim.promises.prompts import PromptOrder
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.model_worker import Row
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.planning.batch_selection import MAX_OVERTAKEN, SMALL

_Entry = tuple[float, int, Stream]


class WaitingRoom:
    """Waiting streams with credit, grouped by queue and ordered by their largest possible key."""

    def __init__(self, keys: "PolicyKeys") -> None:
        self._keys = keys
        self._queues: dict[tuple[str, str], list[_Entry]] = {}
        self._entries: dict[Stream, _Entry] = {}

    def __contains__(self, stream: Stream) -> bool:
        return stream in self._entries

    def enter(self, stream: Stream, sequence: int) -> None:
        """Record that a stream begins to wait."""
        self.leave(stream)
        entry = self._entries[stream] = (self._keys.largest(stream), sequence, stream)
        bisect.insort(self._queues.setdefault(self._keys.queue(stream), []), entry)

    def leave(self, stream: Stream) -> None:
        """Record that a stream no longer waits."""
        entry = self._entries.pop(stream, None)
        if entry is not None:
            queue = self._queues[self._keys.queue(stream)]
            del queue[bisect.bisect_left(queue, entry)]

    def before(self, stream: Stream, sequence: int) -> list[Stream]:
        """Return the streams that are certainly before `stream` in its queue."""
        key = self._keys.smallest(stream), sequence
        queue = self._queues.get(self._keys.queue(stream), [])
        return [entry[2] for entry in queue[: bisect.bisect_left(queue, key)]]


class AdmissionOrder(Promise):
    """Requests are admitted in the order of their policy.

    A request is overtaken only when it could not start. While it lacks memory, at most `MAX_OVERTAKEN` others overtake
    it in one wait. With several workers it may also be assigned to a better placed worker, for a bounded time. A
    shorter request may overtake it in the short part of a step's prompt tokens.
    """

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched)
        self._eligibility = eligibility
        self._prompts = PromptOrder(watched)
        self._room = WaitingRoom(PolicyKeys(watched))
        self._overtaken: dict[Stream, float] = {}
        """For each stream, the number of requests that overtook it in its current wait while it lacked memory."""
        self._since: dict[Stream, float] = {}
        """By stream, the time since which it has lacked memory."""
        self._left: dict[Stream, tuple[float, float]] = {}
        """For each stream, the first and the last time that others overtook it although it could start."""
        self._just_displaced: set[Stream] = set()
        """Streams preempted by the present event. They compete from the next plan on."""
        self._just_left: set[str] = set()
        """Tenants whose waiting streams ended with the present event. Their quota is free from the next plan on."""

    def before(self, event: ev.Event) -> None:
        self._just_displaced.clear()
        self._just_left.clear()

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if isinstance(event, ev.RequestArrived | ev.CreditGranted):
            stream = self.clients.live.get(StreamName(event.frontend, event.stream))
            if stream is not None and stream not in self._room and stream in self.book.waiting:
                self._wait(stream)

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        self._wait(stream)
        if outcome == "preempted":
            self._just_displaced.add(stream)

    def ended(self, stream: Stream) -> None:
        if stream.epoch is None:
            self._just_left.add(stream.demand.tenant)
        self._room.leave(stream)
        self._forget(stream)

    def _wait(self, stream: Stream) -> None:
        if not stream.starved:
            self._room.enter(stream, self.book.sequence[stream])
            self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        self._overtaken.pop(stream, None)
        self._since.pop(stream, None)
        self._left.pop(stream, None)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        if stream not in self._room:
            raise ViolationError("plan.admission", "it was not waiting, or had no credit", stream.name)
        self._room.leave(stream)
        earlier = self._room.before(stream, self.book.sequence[stream])
        if not earlier:
            return
        memory = self._eligibility.memory(epoch, without=stream)
        for other in earlier:
            if other in self._just_displaced:
                continue
            if other.demand.tenant in self._just_left and self._eligibility.has_quota(other):
                continue
            num_given_back = len(self._just_displaced)
            if self._prompts.by_short_part(other, stream, plan, epoch, num_given_back=num_given_back):
                continue
            obstacle = self._eligibility.obstacle(other, epoch, memory, without=stream)
            if obstacle is Obstacle.CREDIT:
                self._forget(other)
            elif obstacle is Obstacle.MEMORY and not self._may_be_held(other, stream, plan, epoch):
                self._left.pop(other, None)
                self._lacked_memory(other, stream)
            elif obstacle is None and self._yields_to_short(other, plan, epoch):
                self._left.pop(other, None)
            elif obstacle is None:
                self._could_start(other, stream)
            elif other.num_known >= self.cluster.longest() or obstacle is Obstacle.MODEL:
                # The request waits outside the queue for a larger worker, or for a worker with its model.
                self._forget(other)
            else:
                self._left.pop(other, None)

    def _may_be_held(self, other: Stream, stream: Stream, plan: Plan, epoch: Epoch) -> bool:
        """Return whether `other` may have been held when `stream` was admitted. A held request is not overtaken."""
        if self._eligibility.held_by(other, epoch, without=stream) is not None:
            return True
        # A request was held before the plan's chunks were chosen if this plan completes its prefix.
        computing = [row for row in _computed_by(plan, epoch) if row.name != stream.name]
        return self._eligibility.shares_prefix_with(other, computing, epoch)

    def _yields_to_short(self, other: Stream, plan: Plan, epoch: Epoch) -> bool:
        """Return whether `other` waits for requests that the plan computes or admits, including shorter ones."""
        if self._eligibility.shares_prefix_with(other, _computed_by(plan, epoch), epoch):
            return True
        admitted = [epoch.model.rows[admission.row] for admission in plan.admissions]
        if not (self.config.serves_short_first and any(row.num_admitted <= other.num_known for row in admitted)):
            return False
        memory = self._eligibility.memory(epoch, admitted=admitted)
        return self._eligibility.obstacle(other, epoch, memory) is not None

    def _lacked_memory(self, other: Stream, stream: Stream) -> None:
        before = self._overtaken.get(other, 0.0)
        count = self._overtaken[other] = before + min(1.0, SMALL * stream.num_known / other.num_known)
        self.seen(Limit.OVERTAKEN)
        if before < MAX_OVERTAKEN <= count:
            self.seen(Limit.OVERTAKEN_MOST)
        since = self._since.setdefault(other, self.world.now)
        if before >= MAX_OVERTAKEN and self.world.now - since >= assigned_s(self):
            self.world.broken("order.overtaken", f"overtaken {count:g} times, last by {stream.name}", other.name)

    def _could_start(self, other: Stream, stream: Stream) -> None:
        now, patience = self.world.now, assigned_s(self)
        since, last = self._left.get(other, (now, now))
        if now - last > patience:
            since = now
        self._left[other] = since, now
        if now - since >= patience:
            self.world.broken("order.policy", f"overtaken without need, last by {stream.name}", other.name)


def _computed_by(plan: Plan, epoch: Epoch) -> list[Row]:
    """Return the rows whose prompts the plan computes."""
    return [row for row in map(epoch.model.rows.get, plan.chunk_rows.tolist()) if row is not None]
