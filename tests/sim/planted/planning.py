"""Bugs of planning: limits of a step, the order of admission, the queue, grammars that are waited for."""

from typing import Any

import pytest

from scheduler_svc.core import admission, planner, waiting
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.batching import BatchingLimits
from scheduler_svc.core.capacity import Capacity
from scheduler_svc.core.grammars import Grammars
from scheduler_svc.core.intake import Intake
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.waiting import KeyedQueue
from scheduler_svc.core.worker import Worker
from tests.sim.planted.aims import with_extras, with_limits, with_moves
from tests.sim.planted.bug import bug, wrap

_CONTINUOUS: dict[str, Any] = {"batching": BatchingLimits(), "tenant_limits": {}, "max_queued_requests": 4096}


@bug("limit.tokens", "plan.tokens", "limit.chunk")
def budget_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A step holds one token more than it may."""

    def larger(init: Any, self: Planner, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._budget += 1

    wrap(patch, Planner, "__init__", larger)


@bug("limit.chunk")
def long_prefill_uncapped(patch: pytest.MonkeyPatch) -> None:
    """One prompt may take the whole step whatever its limit."""

    def uncapped(init: Any, self: Planner, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._max_chunk = 1 << 30

    wrap(patch, Planner, "__init__", uncapped)


@bug("limit.attention")
def attention_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    """Chunks of a long prompt stay as long however far it has got."""
    patch.setattr(planner, "longest_chunk", lambda budget, _context, _break_even: budget)


@bug("limit.attention")
def attention_is_not_paid_for(patch: pytest.MonkeyPatch) -> None:
    """The last chunk of a prompt costs its tokens alone, and the next prompt gets what its attention takes."""
    patch.setattr(planner, "chunk_cost", lambda chunk, _context, _break_even: chunk)


@bug("limit.rows", "core", "plan.admission")
def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_num_seqs runs."""

    def more(init: Any, self: Admission, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._max_running += 1

    wrap(patch, Admission, "__init__", more)


@bug("limit.in_flight")
def one_plan_too_many(patch: pytest.MonkeyPatch) -> None:
    """One plan more than allowed is sent ahead."""
    wrap(patch, Worker, "plan_due", lambda plan_due, self, most: plan_due(self, most + 1))


@bug("limit.queue", "stream.reason")
def queue_one_too_long(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_queued_requests waits."""

    def longer(full: Any, self: Intake, request: Any, num_waiting: int, num_tokens: int) -> Any:
        return full(self, request, num_waiting - 1, num_tokens)

    wrap(patch, Intake, "_queue_is_full", longer)


@bug("plan.admission", "core")
def ended_stays_queued(patch: pytest.MonkeyPatch) -> None:
    """A request that ends while it waits is still handed out by the queue."""

    def take(self: KeyedQueue, cached: Any) -> Any:
        if not self._heap:
            return None
        request = self._heap.pop(0)[2]
        request.queued = False
        return request

    patch.setattr(KeyedQueue, "take", take)


@bug("order.overtaken", "stream.deadline", aim=with_limits(policy="fcfs", giants=0.1, num_workers=1, **_CONTINUOUS))
def preempted_loses_place(patch: pytest.MonkeyPatch) -> None:
    """A request that does not fit goes to the end of the queue."""

    def to_the_end(push: Any, self: KeyedQueue, request: Any) -> None:
        request.sequence += 1000
        push(self, request)

    wrap(patch, KeyedQueue, "give_back", to_the_end)


@bug("plan.admission", "stream.order", "core", aim=with_moves)
def unsettled_admitted(patch: pytest.MonkeyPatch) -> None:
    """A request is admitted before the tokens of its last steps are known."""

    def settled(room: Any, self: Admission, request: Any) -> Any:
        request.unsettled = False
        return room(self, request)

    wrap(patch, Admission, "_room", settled)


@bug("order.overtaken", aim=with_limits(policy="fcfs", giants=0.1, num_workers=1, **_CONTINUOUS))
def overtaking_unbounded(patch: pytest.MonkeyPatch) -> None:
    """Small requests may overtake a large one for ever."""
    patch.setattr(admission, "MAX_OVERTAKEN", 1 << 30)


@bug("order.overtaken", aim=with_limits(policy="priority", num_workers=1, **_CONTINUOUS))
def ageing_off(patch: pytest.MonkeyPatch) -> None:
    """Waiting does not count against priority."""
    patch.setattr(waiting, "AGEING_S", 1e-3)


@bug("work.waiting", "finish", aim=with_limits(num_workers=1, **_CONTINUOUS))
def idle_with_work(patch: pytest.MonkeyPatch) -> None:
    """An empty worker does not take a request that leaves it without a free block."""
    wrap(
        patch,
        Capacity,
        "admits",
        lambda admits, self, rows, num_new, num_available, **other: (
            num_available - num_new > 2 and admits(self, rows, num_new=num_new, num_available=num_available, **other)
        ),
    )


@bug("grammar.compiled", aim=with_extras)
def grammar_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A request is planned before its grammar has been compiled."""
    patch.setattr(Grammars, "is_ready", lambda self, key: True)


@bug("grammar.wanted", aim=with_extras)
def grammar_asked_for_twice(patch: pytest.MonkeyPatch) -> None:
    """A worker is asked for a grammar again while it compiles it."""

    def ask(original: Any, self: Grammars, key: bytes) -> bool:
        original(self, key)
        return True

    wrap(patch, Grammars, "ask", ask)
