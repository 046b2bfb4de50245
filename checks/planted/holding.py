"""Bugs in waiting: groups that wait for a prefix or grammar, clocks, drains, workers with short contexts."""

from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation
from scheduler_svc.core.lifecycle.timeouts import Timeouts
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.holding import Holding
from scheduler_svc.core.queueing.service_ledger import ServiceLedger
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.kinds import Kinds
from scheduler_svc.core.workers.worker import Worker

_PREFIXES = adaptation("groups that wait for one prefix")
_GRAMMARS = adaptation("grammars of several workers")
_DRAINS = adaptation("drains")
_DRAINS_WITHOUT_MEMORY = adaptation("drains without memory")
_FREEZES = adaptation("long freezes")


# ---------------------------------------------------------------- groups


@bug("work.waiting", "finish", "core", "order.policy", aim=_PREFIXES)
def group_released_in_part(patch: pytest.MonkeyPatch) -> None:
    """Of the requests that wait for a block, only the first is released when the block is computed."""

    def first_only(release: Any, self: Holding[Any], key: Any) -> Any:
        if isinstance(key, tuple) and isinstance(key[0], Worker):
            request = self.take(key)
            return iter(() if request is None else (request,))
        return release(self, key)

    wrap(patch, Holding, "release", first_only)


@bug(unseen="two rows have to compute one prefix at different places while a group waits for each of them")
def merged_group_lost(patch: pytest.MonkeyPatch) -> None:
    """A group that begins to wait for a block replaces the group that already waits for it."""

    def replace(self: Holding[Any], key: Any, new_key: Any) -> None:
        if key in self._groups:
            group = self._groups[new_key] = self._groups.pop(key)
            group.key = new_key

    patch.setattr(Holding, "rename", replace)


@bug("work.waiting", "finish", "order.policy", aim=_PREFIXES)
def next_block_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """A group that continues with its next block is not registered as waiting for it."""

    def not_entered(advanced: Any, self: Backlog, worker: Worker, key: Any, now: float) -> None:
        before = set(self._prefixes[worker])
        advanced(self, worker, key, now)
        for new in set(self._prefixes[worker]) - before:
            del self._prefixes[worker][new]

    wrap(patch, Backlog, "_prefix_advanced", not_entered)


@bug("work.waiting", "finish", "order.policy", aim=_PREFIXES)
def pending_after_departure(patch: pytest.MonkeyPatch) -> None:
    """A block still counts as being computed after its row was vacated."""

    def keep(computes_next: Any, self: PrefixCache, row: int, key: bytes) -> None:
        if key:
            computes_next(self, row, key)

    wrap(patch, PrefixCache, "computes_next", keep)


@bug("work.waiting", "finish", aim=_GRAMMARS)
def grammar_of_lost_worker_not_asked(patch: pytest.MonkeyPatch) -> None:
    """A grammar that a lost worker was compiling is not requested from another worker."""

    def keep(changed: Any, self: Backlog, workers: Any, now: float) -> None:
        compiling = dict(self._compiling)
        changed(self, workers, now)
        self._compiling = compiling

    wrap(patch, Backlog, "fleet_changed", keep)


@bug("work.waiting", "finish", aim=_GRAMMARS)
def grammar_waits_for_oldest(patch: pytest.MonkeyPatch) -> None:
    """A request that begins to wait for an already compiled grammar is not released."""

    def not_noted(hold: Any, self: Backlog, request: Request) -> None:
        compiled = {worker: dict(keys) for worker, keys in self._compiled.items()}
        hold(self, request)
        self._compiled = compiled

    wrap(patch, Backlog, "hold_for_grammar", not_noted)


# ---------------------------------------------------------------- drains and short workers


@bug("drain.lost", "stream.reason", "work.waiting", aim=_DRAINS_WITHOUT_MEMORY)
def drained_takes_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """A draining worker does not take back the requests that it preempts."""
    patch.setattr(Backlog, "returns_to", lambda self, request: None)


@bug("work.waiting", "finish", aim=_DRAINS)
def resumed_stays_drained(patch: pytest.MonkeyPatch) -> None:
    """A worker takes no requests after its drain has ended."""

    def stays(resume: Any, self: Fleet, worker_id: str) -> Any:
        worker = resume(self, worker_id)
        if worker is not None:
            self.drain(worker)
        return worker

    wrap(patch, Fleet, "resume", stays)


@bug("drain.moved", aim=_DRAINS)
def moved_by_present_length(patch: pytest.MonkeyPatch) -> None:
    """A drain moves requests if another worker has room for their current tokens but not for their full length."""

    def longest(original: Any, self: Kinds, request: Request) -> int:
        found: int = original(self, request)
        return 1 << 30 if found > len(request.tokens) + 1 else found

    wrap(patch, Kinds, "longest", longest)


@bug("stream.reason", aim=adaptation("losses"))
def cut_off_on_a_shorter_worker(patch: pytest.MonkeyPatch) -> None:
    """A request's limit becomes the context length of the worker that takes it."""

    def cut(limit_of: Any, self: Worker, request: Request) -> int:
        request.limit = limit_of(self, request)
        return request.limit

    wrap(patch, Worker, "limit_of", cut)


@bug("worker.context", aim=adaptation("losses"))
def shorter_workers_serve(patch: pytest.MonkeyPatch) -> None:
    """A request runs on a worker with a short context although a worker with a longer context is available."""
    patch.setattr(Kinds, "serves", lambda self, kind, request: kind.holds(request))


# ---------------------------------------------------------------- clocks


@bug("worker.blamed", aim=adaptation("compiling workers"))
def compilation_not_excused(patch: pytest.MonkeyPatch) -> None:
    """A worker that has announced a compilation is declared lost as early as other workers."""
    patch.setattr(Scheduler, "_worker_compiling", lambda self, event, now: None)


@bug("worker.overdue", "finish", aim=_FREEZES)
def stalls_excused_twice(patch: pytest.MonkeyPatch) -> None:
    """A scheduler stall extends the deadlines of all steps without limit instead of by its duration."""

    def for_good(time_passes: Any, self: Fleet, now: float) -> None:
        last = self._last_time
        time_passes(self, now)
        if last is not None and now - last > 0.1:
            for worker in self:
                for step in worker.in_flight:
                    step.allowance += 60.0

    wrap(patch, Fleet, "time_passes", for_good)


@bug("worker.blamed", aim=adaptation("two plans and freezes"))
def started_when_sent(patch: pytest.MonkeyPatch) -> None:
    """A step counts as started when its plan is sent, even if the previous step has no result yet."""

    def as_sent(done: Any, self: Scheduler, event: Any, now: float) -> None:
        worker = self._fleet.get(event.worker)
        sent = [(step, step.started) for step in worker.in_flight] if worker is not None else []
        done(self, event, now)
        for step, started in sent:
            step.started = started

    wrap(patch, Scheduler, "_step_done", as_sent)


@bug("wait.worker", "finish", aim=_DRAINS_WITHOUT_MEMORY)
def patience_begins_again(patch: pytest.MonkeyPatch) -> None:
    """The time without a worker is counted from the last event."""

    def again(time_passes: Any, self: Fleet, now: float) -> None:
        time_passes(self, now)
        if self.empty_since is not None:
            self.empty_since = now

    wrap(patch, Fleet, "time_passes", again)


@bug("wait.reader", "finish", aim=adaptation("slow readers"))
def readers_never_stall(patch: pytest.MonkeyPatch) -> None:
    """A waiting request does not end although its client does not read."""

    def of_rows(watch: Any, self: Timeouts, request: Request, now: float) -> None:
        if request.state.name == "RUNNING":
            watch(self, request, now)

    wrap(patch, Timeouts, "watch_reader", of_rows)


# ---------------------------------------------------------------- service under other tenants' backlogs


@bug(unseen="service is compared only while both tenants wait; the unit tests check the lift")
def returning_tenant_not_lifted(patch: pytest.MonkeyPatch) -> None:
    """Under `fair`, a tenant that returns is served until it has caught up."""
    patch.setattr(ServiceLedger, "_floor", lambda self: 0.0)
