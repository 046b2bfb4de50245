"""Bugs to plant into the core, one at a time: each is a patch and the checks that may find it."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from scheduler_svc.core import admission, commit, waiting, worker
from scheduler_svc.core.admission import Admission
from scheduler_svc.core.batching import BatchingLimits
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.capacity import Capacity
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.grammars import Grammars
from scheduler_svc.core.kept import KeptLogs
from scheduler_svc.core.partial_blocks import PartialBlocks
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.prefix_cache import PrefixCache
from scheduler_svc.core.registry import RequestRegistry
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.waiting import KeyedQueue
from scheduler_svc.core.worker import Worker
from scheduler_svc.sim.faults import STEP_FAULTS, TIMED_FAULTS, Fault, FaultRates
from scheduler_svc.sim.scenario import Scenario

_CONTINUOUS: dict[str, Any] = {"batching": BatchingLimits(), "tenant_limits": {}, "max_queued_requests": 4096}

Patch = Callable[[pytest.MonkeyPatch], None]
Aim = Callable[[Scenario], Scenario]


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug, the names of the checks of which one must find it ("core": an assertion of the core's own), and, for bugs
    that only a rare situation shows, what makes the drawn scenarios meet it more often."""

    name: str
    plant: Patch
    found_by: frozenset[str]
    aim: Aim


BUGS: list[PlantedBug] = []


def bug(*found_by: str, aim: Aim = lambda scenario: scenario) -> Callable[[Patch], Patch]:
    """Registers a patch as a planted bug."""

    def register(patch: Patch) -> Patch:
        BUGS.append(PlantedBug(patch.__name__, patch, frozenset(found_by), aim))
        return patch

    return register


def with_faults(*faults: Fault, per_step: float = 0.05, per_100_steps: float = 2.0) -> Aim:
    """Scenarios with exactly these faults."""

    def aim(scenario: Scenario) -> Scenario:
        rates = FaultRates(
            of_steps=tuple(fault for fault in faults if fault in STEP_FAULTS),
            per_step=per_step if set(faults) & set(STEP_FAULTS) else 0.0,
            timed=tuple(fault for fault in faults if fault in TIMED_FAULTS),
            per_s=per_100_steps / 100 / scenario.pace.step if set(faults) & set(TIMED_FAULTS) else 0.0,
            of_requests={},
        )
        return dataclasses.replace(scenario, faults=rates)

    return aim


def with_limits(*, num_workers: int | None = None, giants: float = 0.0, **limits: Any) -> Aim:
    """Scenarios with these limits."""

    def aim(scenario: Scenario) -> Scenario:
        return dataclasses.replace(
            scenario,
            config=dataclasses.replace(scenario.config, **limits),
            workers=scenario.workers[:num_workers],
            traffic=dataclasses.replace(scenario.traffic, giants=giants or scenario.traffic.giants, traced=1.0),
        )

    return aim


def with_long_freezes(scenario: Scenario) -> Scenario:
    """Workers stand still for seconds without being given up, and so does the scheduler, about as often."""
    patient = with_limits(step_deadline_s=5.0, worker_wait_s=10.0)(scenario)
    return with_faults(Fault.SCHEDULER_STALL, Fault.FREEZE, per_100_steps=50 * scenario.pace.step)(patient)


def with_moves(scenario: Scenario) -> Scenario:
    """Three equal workers, two plans in flight, and drains that move requests."""
    several = dataclasses.replace(with_limits(max_plans_in_flight=2)(scenario), workers=scenario.workers[:1] * 3)
    return with_faults(Fault.DRAIN, per_100_steps=100 * scenario.pace.step)(several)


def with_extras(scenario: Scenario) -> Scenario:
    """Many requests have grammars, ask for log-probabilities, or are come back to."""
    traffic = dataclasses.replace(scenario.traffic, grammars=0.5, scored=0.5, identified=0.5)
    config = dataclasses.replace(scenario.config, resume_keep_s=300.0, resume_keep_bytes=1 << 28)
    return dataclasses.replace(scenario, traffic=traffic, config=config)


def with_few_words(scenario: Scenario) -> Scenario:
    """Prompts repeat themselves, and the cache is on."""
    return dataclasses.replace(
        scenario,
        config=dataclasses.replace(scenario.config, prefix_cache="hash"),
        traffic=dataclasses.replace(scenario.traffic, alphabet=2),
    )


def _wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function by `around(original, *arguments)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **keywords: around(original, *arguments, **keywords))


@bug("core", "empty")
def leaked_block(patch: pytest.MonkeyPatch) -> None:
    """The last block of a table is not given back."""
    _wrap(patch, BlockPool, "release", lambda release, self, blocks, **steps: release(self, blocks[:-1], **steps))


@bug("core")
def double_free(patch: pytest.MonkeyPatch) -> None:
    """A table's blocks are given back twice."""

    def twice(release: Any, self: BlockPool, blocks: Any, **steps: int) -> None:
        release(self, blocks, **steps)
        release(self, blocks, **steps)

    _wrap(patch, BlockPool, "release", twice)


@bug("kv.reuse")
def freed_too_early(patch: pytest.MonkeyPatch) -> None:
    """A freed block is handed out although a step in flight may write it."""
    _wrap(
        patch,
        BlockPool,
        "release",
        lambda release, self, blocks, last_step, answered_step: release(
            self, blocks, last_step=answered_step, answered_step=answered_step
        ),
    )


@bug("kv.reuse", "kv.exclusive", "kv.prefix")
def swapped_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a plan copies to the host are free before it is answered."""
    _wrap(patch, Worker, "_vacate", lambda vacate, self, row, last_step: vacate(self, row, self.answered_step))


@bug("stream.ends")
def lost_cancel(patch: pytest.MonkeyPatch) -> None:
    """A cancel is not acted upon."""
    patch.setattr(Scheduler, "_request_cancelled", lambda self, event, now: None)


@bug("stream.ends")
def lost_stop_string(patch: pytest.MonkeyPatch) -> None:
    """A stop string that the front end has found is not acted upon."""
    patch.setattr(Scheduler, "_stop_matched", lambda self, event, now: None)


@bug("core", "kv.exclusive", "plan.append", "kv.reuse", "kv.capacity")
def swapped_tables(patch: pytest.MonkeyPatch) -> None:
    """Two rows that get a block in the same step get each other's."""

    def crossed(issue: Any, self: Planner, decodes: Any) -> Any:
        plan = issue(self, decodes)
        return dataclasses.replace(plan, append_rows=plan.append_rows[::-1])

    _wrap(patch, Planner, "_issue", crossed)


@bug("kv.prefix", "plan.chunk", "kv.exclusive")
def computed_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """One token more than there is counts as computed."""

    def more(place: Any, self: Planner, *arguments: Any) -> Any:
        placed = place(self, *arguments)
        return dataclasses.replace(placed, num_computed_tokens=placed.num_computed_tokens + 1)

    _wrap(patch, Planner, "_place", more)


@bug("stream.order", "stream.ends")
def lost_token(patch: pytest.MonkeyPatch) -> None:
    """Of a step's tokens the last is not delivered when there are several."""

    def fewer(ready: Any, self: Scheduler, frontend: bytes, streams: Any, indices: Any, tokens: Any) -> None:
        kept = max(1, len(streams) - 1)
        ready(self, frontend, streams[:kept], indices[:kept], tokens[:kept])

    _wrap(patch, Scheduler, "_tokens_ready", fewer)


@bug("stream.ends", "stream.after_end")
def stop_token_ignored(patch: pytest.MonkeyPatch) -> None:
    """Generation goes on after a stop token."""
    patch.setattr(RowTable, "stopped", lambda self, rows, tokens: np.zeros(0, np.int32))


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


@bug("stream.credit")
def credit_ignored(patch: pytest.MonkeyPatch) -> None:
    """Rows go on without credit."""
    _wrap(patch, RowTable, "set_allowed", lambda set_allowed, self, row, allowed: set_allowed(self, row, 1 << 30))


@bug("limit.tokens", "plan.tokens", "limit.chunk")
def budget_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A step holds one token more than it may."""

    def larger(init: Any, self: Planner, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._budget += 1

    _wrap(patch, Planner, "__init__", larger)


@bug("limit.rows", "core", "plan.admission")
def one_row_too_many(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_num_seqs runs."""

    def more(init: Any, self: Admission, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._max_running += 1

    _wrap(patch, Admission, "__init__", more)


@bug("worker.stale", "core", aim=with_faults(Fault.STALE_EPOCH))
def stale_epoch_accepted(patch: pytest.MonkeyPatch) -> None:
    """An answer of an epoch that is over is taken for one of the present epoch."""
    _wrap(patch, Scheduler, "_known", lambda known, self, event: self._fleet.get(event.worker) or known(self, event))


@bug("worker.wrong", aim=with_faults(Fault.WRONG_ROWS))
def wrong_rows_believed(patch: pytest.MonkeyPatch) -> None:
    """An answer about other rows than the plan's is believed."""
    patch.setattr(commit, "_are_same", lambda planned, answered: len(planned) == len(answered))


@bug("stream.order", "plan.admission", "stream.token", "core")
def preempted_loses_token(patch: pytest.MonkeyPatch) -> None:
    """A request that leaves its worker forgets its newest token."""

    def forgets(displace: Any, self: RequestRegistry, request: Any, *arguments: Any) -> None:
        if len(request.tokens) > request.num_prompt_tokens:
            request.tokens.pop()
        displace(self, request, *arguments)

    _wrap(patch, RequestRegistry, "displace", forgets)


@bug("order.overtaken", "stream.deadline", aim=with_limits(policy="fcfs", giants=0.1, num_workers=1, **_CONTINUOUS))
def preempted_loses_place(patch: pytest.MonkeyPatch) -> None:
    """A request that does not fit goes to the end of the queue."""

    def to_the_end(push: Any, self: KeyedQueue, request: Any) -> None:
        request.sequence += 1000
        push(self, request)

    _wrap(patch, KeyedQueue, "give_back", to_the_end)


@bug("stream.order", "plan.admission", "finish", "work.running", "core")
def late_token_dropped(patch: pytest.MonkeyPatch) -> None:
    """A token for a request that has left its row is thrown away."""
    patch.setattr(commit, "_settle_late", lambda *arguments: None)


@bug("plan.admission", "stream.order", "core", aim=with_moves)
def unsettled_admitted(patch: pytest.MonkeyPatch) -> None:
    """A request is admitted before the tokens of its last steps are known."""

    def settled(room: Any, self: Admission, request: Any) -> Any:
        request.unsettled = False
        return room(self, request)

    _wrap(patch, Admission, "_room", settled)


@bug("prefix.salt")
def key_without_salt(patch: pytest.MonkeyPatch) -> None:
    """Everybody shares everybody's prefixes."""
    _wrap(patch, worker, "root_key", lambda root_key, fingerprint, salt: root_key(fingerprint, b""))


@bug("kv.prefix", "core", aim=with_few_words)
def key_without_parent(patch: pytest.MonkeyPatch) -> None:
    """The key of a block depends on its own tokens only."""

    def following(parent: bytes, token_bytes: bytes, block_size: int) -> bytes:
        width = 4 * block_size
        starts = range(0, len(token_bytes) - width + 1, width)
        return b"".join(sha256(token_bytes[start : start + width]).digest() for start in starts)

    patch.setattr(worker, "following_keys", following)


@bug("kv.prefix", "prefix.salt", "core")
def cache_keeps_evicted(patch: pytest.MonkeyPatch) -> None:
    """A block whose memory is given to another request still counts as the old prefix."""

    def evict(evict: Any, self: BlockPool, count: int) -> None:
        forget = self.cache.forget
        self.cache.forget = lambda blocks: blocks  # type: ignore[method-assign]
        evict(self, count)
        self.cache.forget = forget  # type: ignore[method-assign]

    _wrap(patch, BlockPool, "_evict", evict)


@bug("kv.prefix", aim=with_limits(prefix_cache="radix"))
def copy_not_sent(patch: pytest.MonkeyPatch) -> None:
    """What a block begins with is counted as computed but not copied."""
    _wrap(
        patch,
        Planner,
        "_issue",
        lambda issue, self, decodes: dataclasses.replace(
            issue(self, decodes), copy_sources=np.zeros(0, np.intp), copy_targets=np.zeros(0, np.intp)
        ),
    )


@bug("kv.prefix", aim=with_limits(prefix_cache="radix"))
def copied_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """One token more than agrees is copied."""

    def more(find: Any, self: PartialBlocks, before: bytes, tokens: bytes) -> Any:
        match = find(self, before, tokens)
        if match is not None and 4 * match.num_tokens < len(tokens):
            match = match._replace(num_tokens=match.num_tokens + 1)
        return match

    _wrap(patch, PartialBlocks, "find", more)


@bug("kv.reuse", "kv.prefix", "plan.copy", aim=with_limits(prefix_cache="radix"))
def source_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A block that is copied from may be handed out before the copy is made."""
    patch.setattr(BlockPool, "read", lambda self, blocks, **steps: None)


@bug(
    "kv.spoilt",
    "kv.reuse",
    aim=lambda scenario: with_limits(prefix_cache="radix")(with_faults(Fault.SPOILT_ROW)(scenario)),
)
def unproven_copied(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied from before a token was sampled from them."""

    def proven(publish: Any, self: Worker, row: int, request: Any, blocks: Any, num_computed: int) -> None:
        publish(self, row, request, blocks, num_computed)
        num_full = num_computed // self.rows.block_size
        self._prove(request, blocks[:num_full], num_full * self.rows.block_size)

    _wrap(patch, Worker, "_publish", proven)


@bug("prefix.salt", aim=with_limits(prefix_cache="radix"))
def copied_across_salts(patch: pytest.MonkeyPatch) -> None:
    """Parts of first blocks are copied from everybody's."""
    for name in ("match_partial", "prove"):
        _wrap(patch, PrefixCache, name, lambda call, self, root, *arguments: call(self, b"", *arguments))


@bug("order.overtaken", aim=with_limits(policy="fcfs", giants=0.1, num_workers=1, **_CONTINUOUS))
def overtaking_unbounded(patch: pytest.MonkeyPatch) -> None:
    """Small requests may overtake a large one for ever."""
    patch.setattr(admission, "MAX_OVERTAKEN", 1 << 30)


@bug("order.overtaken", aim=with_limits(policy="priority", num_workers=1, **_CONTINUOUS))
def ageing_off(patch: pytest.MonkeyPatch) -> None:
    """Waiting does not count against priority."""
    patch.setattr(waiting, "AGEING_S", 1e-3)


@bug("limit.in_flight")
def one_plan_too_many(patch: pytest.MonkeyPatch) -> None:
    """One plan more than allowed is sent ahead."""
    _wrap(patch, Worker, "plan_due", lambda plan_due, self, most: plan_due(self, most + 1))


@bug("work.waiting", "finish", aim=with_limits(num_workers=1, **_CONTINUOUS))
def idle_with_work(patch: pytest.MonkeyPatch) -> None:
    """An empty worker does not take a request that leaves it without a free block."""
    _wrap(
        patch,
        Capacity,
        "admits",
        lambda admits, self, rows, num_new, num_available, **other: (
            num_available - num_new > 2 and admits(self, rows, num_new=num_new, num_available=num_available, **other)
        ),
    )


@bug("worker.blamed", aim=with_long_freezes)
def stall_blamed(patch: pytest.MonkeyPatch) -> None:
    """Workers are given up because the scheduler itself stood still."""

    def no_excuse(time_passes: Any, self: Fleet, now: float) -> None:
        allowances = [(step, step.allowance) for each in self for step in each.in_flight]
        time_passes(self, now)
        for step, allowance in allowances:
            step.allowance = allowance

    _wrap(patch, Fleet, "time_passes", no_excuse)


@bug("stream.deadline")
def deadline_ignored(patch: pytest.MonkeyPatch) -> None:
    """Requests outlive their deadlines."""

    def without_deadlines(time_passed: Any, self: RequestRegistry, now: float) -> None:
        self._deadlines.clear()
        time_passed(self, now)

    _wrap(patch, RequestRegistry, "time_passed", without_deadlines)


@bug("limit.queue", "stream.reason")
def queue_one_too_long(patch: pytest.MonkeyPatch) -> None:
    """One request more than max_queued_requests waits."""

    def longer(full: Any, self: RequestRegistry, request: Any) -> Any:
        return full(self, request) and self.num_waiting > self._config.max_queued_requests

    _wrap(patch, RequestRegistry, "_queue_is_full", longer)


@bug("core", "finish", "empty", "work.running")
def worker_loss_forgets(patch: pytest.MonkeyPatch) -> None:
    """Requests of a lost worker whose last step was planned are forgotten."""
    _wrap(
        patch,
        Fleet,
        "leave",
        lambda leave, self, lost, now: [r for r in leave(self, lost, now) if r.state.name != "ENDING"],
    )


@bug("kv.spoilt", aim=with_faults(Fault.SPOILT_ROW))
def spoilt_is_shared(patch: pytest.MonkeyPatch) -> None:
    """What a failed row wrote stays in the prefix cache."""
    patch.setattr(BlockPool, "distrust", lambda self, blocks: None)


@bug("limit.chunk")
def long_prefill_uncapped(patch: pytest.MonkeyPatch) -> None:
    """One prompt may take the whole step whatever its limit."""

    def uncapped(init: Any, self: Planner, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self._max_chunk = 1 << 30

    _wrap(patch, Planner, "__init__", uncapped)


@bug("worker.draining", aim=with_faults(Fault.DRAIN))
def drained_gets_work(patch: pytest.MonkeyPatch) -> None:
    """A worker that is drained takes new requests."""

    def undrained(init: Any, self: Admission, asking: Worker, *arguments: Any, **keywords: Any) -> None:
        init(self, asking, *arguments, **keywords)
        asking.draining = False

    _wrap(patch, Admission, "__init__", undrained)


@bug("stream.ends_once", "stream.order", "stream.after_end", "core", "stream.unknown", "frontend.gone")
def frontends_confused(patch: pytest.MonkeyPatch) -> None:
    """Tokens go to the front end that joined first."""
    _wrap(
        patch, RowTable, "occupy", lambda occupy, self, *a, frontend_index, **k: occupy(self, *a, frontend_index=0, **k)
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

    _wrap(patch, Grammars, "ask", ask)


@bug("scores.wrong", "scores.missing", aim=with_extras)
def scores_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """Log-probabilities come with the index of the token before theirs."""
    _wrap(
        patch,
        commit,
        "_scores",
        lambda scores, *a: [(request, index - 1, of_prompt, each) for request, index, of_prompt, each in scores(*a)],
    )


@bug("resume.duplicate", "log.begun", aim=with_extras)
def duplicate_accepted(patch: pytest.MonkeyPatch) -> None:
    """A second request of the same id runs beside the first."""
    _wrap(
        patch,
        RequestRegistry,
        "arrive",
        lambda arrive, self, event, now: (self._identified.pop(event.identity, None), arrive(self, event, now))[1],
    )


@bug("resume.tokens", aim=with_extras)
def log_one_short(patch: pytest.MonkeyPatch) -> None:
    """The newest token is missing from what is kept of a request."""
    _wrap(
        patch,
        KeptLogs,
        "put",
        lambda put, self, key, log, now: put(self, key, dataclasses.replace(log, tokens=log.tokens[:-4]), now),
    )


@bug("resume.over", aim=with_extras)
def taken_over_and_going_on(patch: pytest.MonkeyPatch) -> None:
    """A request goes on although its client has asked for it elsewhere."""

    def resume(original: Any, self: RequestRegistry, event: Any, now: float) -> None:
        live = self._identified.pop(event.identity, None)
        original(self, event, now)
        if live is not None:
            self._identified[event.identity] = live

    _wrap(patch, RequestRegistry, "resume", resume)


@bug("plan.pooling")
def mean_begins_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """A request for a mean goes on from what the cache, or host memory, has of its prompt."""
    patch.setattr(Request, "starts_over", False)

    def from_the_cache(match: Any, self: Worker, request: Request) -> Any:
        whole, request.computes_whole_prompt = request.computes_whole_prompt, False
        found = match(self, request)
        request.computes_whole_prompt = whole
        return found

    _wrap(patch, Worker, "match", from_the_cache)
