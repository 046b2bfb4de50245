"""The number of requests that may wait."""

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.quotas import limits_of
from checks.sim.stream import Stream
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason


class QueueLimits(Promise):
    """A new request is refused if and only if the queue, or its tenant's part of it, is full.

    The queue is full with `max_queued_requests` requests, or when the tokens of a further one would exceed
    `max_queued_tokens`. A single request may always wait. What an earlier core has accepted is never refused.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._new: Stream | None = None
        """Request that the present event submits, if it can be judged."""
        self._must = self._may = False
        """Whether the request must be refused, and whether it may be refused because the queue is full."""
        self._of_tenant = False
        """Whether it must be refused because its tenant is at its limit."""

    def before(self, event: ev.Event) -> None:
        self._new = None
        if not isinstance(event, ev.RequestArrived):
            return
        stream = self.clients.live.get(StreamName(event.frontend, event.stream))
        if stream is None or self.book.knows(stream) or event.accepted:
            return
        self._new = stream
        # A call that takes over a request first ends the other stream, which makes room.
        beside = [each for each in self.book.waiting if not (event.again and each.identity == event.spec.identity)]
        fewest = sum(map(self.book.waiting.__getitem__, beside)) + stream.num_known
        most = sum(each.num_known for each in beside) + stream.num_known
        tenant = stream.demand.tenant
        limits = limits_of(self.config, tenant)
        queued = sum(each.demand.tenant == tenant for each in beside)
        self._of_tenant = 0 < limits.max_queued <= queued
        full = len(beside) >= self.config.max_queued_requests
        self._must = self._of_tenant or full or (bool(beside) and fewest > self.config.max_queued_tokens)
        self._may = full or (bool(beside) and most > self.config.max_queued_tokens)

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        if reason not in (EndReason.QUEUE_FULL, EndReason.TENANT_LIMIT):
            return None
        self.seen(Limit.QUEUE)
        if stream is not self._new:
            return "it was accepted before"
        if reason is EndReason.TENANT_LIMIT:
            return None if self._of_tenant else "its tenant is not at its limit"
        return None if self._may else f"only {len(self.book.waiting)} requests were waiting"

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        stream = self._new
        if stream is not None and stream.end is None and self._must:
            raise ViolationError("limit.queue", f"{len(self.book.waiting)} wait already", stream.name)
