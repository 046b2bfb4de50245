"""The number of requests that may wait."""

from collections.abc import Callable

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.quotas import limits_of
from checks.sim.stream import Stream
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason

_SHARE = 8
"""A tenant may have this many times as much in the queue as is free."""


class QueueLimits(Promise):
    """A new request is refused if and only if the queue, its tenant's limit or its tenant's share of the queue is full.

    The queue is full with `max_queued_requests` requests, or if another request's tokens would exceed
    `max_queued_tokens`. A single request may always wait. If a tenant already has waiting requests, its requests and
    tokens, including the new request, may be at most eight times the queue's free room. Requests accepted by an earlier
    core are never refused.
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
        # A call that resumes a request first ends the other stream, which frees a place.
        beside = [each for each in self.book.waiting if not (event.again and each.identity == event.spec.identity)]
        own = [each for each in beside if each.demand.tenant == stream.demand.tenant]
        self._of_tenant = 0 < limits_of(self.config, stream.demand.tenant).max_queued <= len(own)
        room = self.config.max_queued_requests - len(beside)
        full = room <= 0 or (bool(own) and len(own) + 1 > _SHARE * room)
        self._must = self._of_tenant or full or self._lacks_tokens(stream, beside, own, self.book.waiting.__getitem__)
        self._may = full or self._lacks_tokens(stream, beside, own, lambda each: each.num_known)

    def _lacks_tokens(
        self, new: Stream, beside: list[Stream], own: list[Stream], count: Callable[[Stream], int]
    ) -> bool:
        """Return whether too many tokens would wait, by the tokens that `count` returns for a waiting stream."""
        free = self.config.max_queued_tokens - sum(map(count, beside)) - new.num_known
        over_share = bool(own) and sum(map(count, own)) + new.num_known > _SHARE * (free + 1)
        return bool(beside) and (free < 0 or over_share)

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
