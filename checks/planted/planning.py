"""Bugs in planning: step limits, admission order, the queue, requests that wait for grammars."""

from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    CONTINUOUS,
    both,
    with_extras,
    with_limits,
    with_long_prompts,
    with_moves,
    with_much_memory,
    with_overload,
)
from scheduler_svc.core.lifecycle.admission_control import AdmissionControl
from scheduler_svc.core.planning import batch_selection, planner, prompt_chunks
from scheduler_svc.core.planning.batch_selection import Admission
from scheduler_svc.core.planning.planner import Planner
from scheduler_svc.core.planning.prompt_chunks import StepChunks
from scheduler_svc.core.queueing import policies
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.policies import KeyedQueue
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers import chunks
from scheduler_svc.core.workers.capacity import Capacity
from scheduler_svc.core.workers.cost_model import CostModel, StepShape
from scheduler_svc.core.workers.grammars import Grammars
from scheduler_svc.core.workers.worker import Worker

_LONG_PROMPTS = both(with_much_memory, with_limits(num_workers=1, classes={}, policy="balanced", **CONTINUOUS))
"""One worker with a large memory."""
_MANY_PROMPTS = both(_LONG_PROMPTS, with_overload, with_limits(max_num_seqs=12, max_num_batched_tokens=20))
"""The same with more prompts than its steps can hold."""


@bug("limit.tokens", "plan.tokens", "limit.chunk")
def budget_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A step may contain one token more than its limit."""

    def larger(init: Any, self: Planner, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._chunks.budget += 1

    wrap(patch, Planner, "__init__", larger)


@bug("limit.chunk")
def long_prefill_uncapped(patch: pytest.MonkeyPatch) -> None:
    """One prompt may use the whole step, regardless of the limit per prompt."""

    def uncapped(init: Any, self: StepChunks, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._longest = 1 << 30

    wrap(patch, StepChunks, "__init__", uncapped)


@bug("limit.attention")
def attention_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    """Chunks of a long prompt do not become shorter as its context grows."""
    patch.setattr(prompt_chunks, "longest_chunk", lambda budget, _context, _break_even: budget)


@bug("limit.attention")
def attention_is_not_paid_for(patch: pytest.MonkeyPatch) -> None:
    """A prompt's last chunk is charged without its attention, so the next prompt gets too large a chunk."""
    patch.setattr(prompt_chunks, "chunk_cost", lambda chunk, _context, _break_even: chunk)


@bug("order.prompts", aim=_MANY_PROMPTS)
def short_prompts_take_all(patch: pytest.MonkeyPatch) -> None:
    """The shortest prompts get all prompt tokens of a step, so a long one waits for as long as others arrive."""
    patch.setattr(planner, "short_part", lambda budget, _step, **_: budget)


@bug("order.prompts", aim=_MANY_PROMPTS)
def first_prompt_counts_as_late(patch: pytest.MonkeyPatch) -> None:
    """The shortest prompts get three quarters of a step even while the first prompt can be in time."""
    patch.setattr(Planner, "_first_is_late", lambda _self, _under_way: True)


@bug("order.prompts", aim=_LONG_PROMPTS)
def longest_prompt_first(patch: pytest.MonkeyPatch) -> None:
    """The short part goes to the prompts with the most tokens left."""
    wrap(patch, StepChunks, "rest", lambda rest, self, row: -rest(self, row))


@bug("order.short", aim=_LONG_PROMPTS)
def short_prompts_wait(patch: pytest.MonkeyPatch) -> None:
    """There is no part for short prompts: they wait for the long ones under way."""
    patch.setattr(planner, "short_part", lambda _budget, _step, **_: 0)


@bug("order.prompts", aim=both(_LONG_PROMPTS, with_limits(policy="priority")))
def urgent_prompts_wait(patch: pytest.MonkeyPatch) -> None:
    """Started prompts continue in order of admission, even if a later request is more urgent."""

    def by_admission(_share: Any, self: Planner, under_way: list[int], admission: Any) -> None:
        self._share_short_part(under_way, admission)
        for row in self._prompts_under_way():
            self._chunks.add(row)

    wrap(patch, Planner, "_share", by_admission)


@bug("limit.target", aim=with_long_prompts)
def target_ignored(patch: pytest.MonkeyPatch) -> None:
    """Chunks use the whole budget without regard to the ITL of concurrent decode rows."""
    patch.setattr(chunks, "affordable_tokens", lambda _target_s, _decode_s, _token_s: 1 << 30)


@bug("limit.target", aim=with_long_prompts)
def slow_steps_not_learned(patch: pytest.MonkeyPatch) -> None:
    """The time of chunks is learned as if every step took as long as one without chunks."""

    def forgetful(measured: Any, self: CostModel, shape: StepShape, duration: float, **more: Any) -> None:
        without = self.expected_s(shape._replace(prompt_tokens=0))
        measured(self, shape, min(duration, without or duration), **more)

    wrap(patch, CostModel, "measured", forgetful)


@bug("limit.rows", "core", "plan.admission")
def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_num_seqs runs."""

    def more(init: Any, self: Admission, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._max_running += 1

    wrap(patch, Admission, "__init__", more)


@bug("limit.in_flight")
def one_plan_too_many(patch: pytest.MonkeyPatch) -> None:
    """One plan more than allowed is in flight."""
    wrap(patch, Worker, "plan_due", lambda plan_due, self, most: plan_due(self, most + 1))


@bug("limit.queue", "stream.reason")
def queue_one_too_long(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_queued_requests waits."""

    def longer(full: Any, self: AdmissionControl, request: Any, num_waiting: int, num_tokens: int) -> Any:
        return full(self, request, num_waiting - 1, num_tokens)

    wrap(patch, AdmissionControl, "_queue_is_full", longer)


@bug("plan.admission", "core")
def ended_stays_queued(patch: pytest.MonkeyPatch) -> None:
    """The queue still returns a request that ended while it was waiting."""

    def pop(self: KeyedQueue) -> Any:
        return self._heap.pop(0)[2] if self._heap else None

    patch.setattr(KeyedQueue, "pop", pop)


@bug(
    "order.overtaken",
    "order.policy",
    "stream.deadline",
    aim=with_limits(policy="fcfs", giants=0.1, num_workers=1, **CONTINUOUS),
)
def preempted_loses_place(patch: pytest.MonkeyPatch) -> None:
    """A request that does not fit moves to the end of the queue."""

    def to_the_end(put_back: Any, self: Backlog, request: Any) -> None:
        request.sequence += 1000
        put_back(self, request)

    wrap(patch, Backlog, "put_back", to_the_end)


@bug("plan.admission", "stream.order", "core", aim=with_moves)
def unsettled_admitted(patch: pytest.MonkeyPatch) -> None:
    """A request is admitted before the tokens of its last steps are known."""

    def settled(is_eligible: Any, self: Admission, request: Any) -> Any:
        request.unsettled = False
        return is_eligible(self, request)

    wrap(patch, Admission, "_is_eligible", settled)


@bug("order.overtaken", "order.policy", aim=with_limits(policy="fcfs", giants=0.1, num_workers=1, **CONTINUOUS))
def overtaking_unbounded(patch: pytest.MonkeyPatch) -> None:
    """Small requests may overtake a large request without limit."""
    patch.setattr(batch_selection, "MAX_OVERTAKEN", 1 << 30)


@bug("order.overtaken", "order.policy", aim=with_limits(policy="priority", num_workers=1, **CONTINUOUS))
def ageing_off(patch: pytest.MonkeyPatch) -> None:
    """Waiting does not count against priority."""
    patch.setattr(policies, "AGEING_S", 1e-3)


@bug("work.waiting", "finish", aim=with_limits(num_workers=1, **CONTINUOUS))
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
    """A worker is asked for a grammar again while it is compiling the grammar."""

    def again(compile_: Any, self: Scheduler, worker: Any, requests: Any) -> None:
        compile_(self, worker, [*requests, *requests])

    wrap(patch, Scheduler, "_compile", again)
