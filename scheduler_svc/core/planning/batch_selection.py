"""Batch selection: which waiting requests get a row in the current plan, and when an urgent request preempts a row.

`admission_control` decides earlier which requests may wait; `victims` chooses the rows to preempt.

Smaller requests may overtake a request that lacks memory, but only `MAX_OVERTAKEN` times. After that, no request is
admitted before it. A large request therefore neither blocks others forever nor starves. The same bound holds for a
suspect request, which waits to run alone. A request that cannot start for another reason is held separately
(`backlog`), and is not overtaken by requests that are admitted in the meantime.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.interface.config import PREEMPTIVE_POLICIES, CoreConfig
from scheduler_svc.core.interface.records import EndReason, WaitReason
from scheduler_svc.core.planning.host_copies import HostCopies
from scheduler_svc.core.planning.victims import Candidates, choose_victims
from scheduler_svc.core.queueing.backlog import Backlog, waits_for_prefix
from scheduler_svc.core.queueing.placement import DECODE_COST, MAX_ASSIGNED, NOTHING_CACHED, Placement, Room, find_room
from scheduler_svc.core.queueing.policies import Place, late_rank
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.cached_prefixes import Match
from scheduler_svc.core.workers.rows import DECODE
from scheduler_svc.core.workers.worker import Worker
from shared.frames import PACKED_BYTES, TOKEN_BYTES

MAX_ADMITTED_BYTES = PACKED_BYTES
"""Limit on the bytes for a plan's admissions.

One request alone takes less than `MAX_PART_BYTES` and its block table, so every plan fits into a frame.
"""
_OVERHEAD = 256
"""Upper bound on the bytes of an admission without its long fields."""
MAX_ADMITTED = 128
"""Maximum number of requests that one plan admits. It bounds the planning time."""
MAX_OVERTAKEN = 16
"""Maximum number of later requests admitted before a request that lacks memory. Small requests count less."""
SMALL = 32
"""A request with fewer than 1 / SMALL of the overtaken request's tokens counts less.

All small requests that overtake a large one therefore take at most half of the memory that it needs.
"""
MAX_OVERTAKING_TRIES = 8
"""Maximum number of requests that lack memory and are skipped in one plan."""
MAX_LOOKED_PAST = 256
"""Maximum number of requests that cannot start for another reason and are skipped in one plan."""
MAX_LATE = 1024
"""Maximum number of requests that lose their place in one plan because they missed their targets."""
ROWS_PER_ROW = 8
"""Maximum ratio between two tenants' rows under `fair` while the tenant with fewer rows waits for one."""
_RECOMPUTE_PAUSE = 8.0
"""Interval between preemptions for tenants' rows, in units of the preempted request's recomputation time."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A waiting request that no worker can run, or that cannot finish in time."""

    request: Request
    reason: EndReason
    message: str


class Admission:
    """Admissions for one worker's next plan. Call `next` until it returns None, then `close`."""

    def __init__(
        self,
        worker: Worker,
        backlog: Backlog,
        placement: Placement | None,
        tenants: Tenants,
        config: CoreConfig,
        now: float,
        copies: HostCopies | None = None,
    ) -> None:
        """Begin the admissions of a worker's plan.

        Args:
            worker: the worker.
            backlog: the waiting requests.
            placement: None if there is no other worker.
            tenants: limits of tenants.
            config: settings of the service.
            now: present time, s.
            copies: the plan's copies of cached blocks; None if the plan copies none back.
        """
        self._copies = copies
        self._worker = worker
        self._backlog = backlog
        self._placement = placement
        self._tenants = tenants
        self._config = config
        self._now = now
        self._max_running = min(config.max_num_seqs, worker.rows.max_rows)
        self._overtakable: list[Request] = []
        """Requests that lack memory, and suspect requests; others may overtake them up to the bound."""
        self._looked_past: list[Request] = []
        """Requests that cannot start now for another reason."""
        self._num_looked_past = 0
        """Number of requests in `_looked_past`, plus the held and assigned ones."""
        self._num_late = 0
        """Number of requests that lost their place because they missed their target."""
        self._num_admitted = 0
        self._num_bytes = 0
        """Bytes that the admissions take in the plan's frame."""
        self._load = placement.load(worker) if placement is not None else 0
        """The worker's load including the admitted requests, in tokens."""
        self._ranked: dict[int, int] = {}
        """By sequence number, the cached tokens when the request was first ranked for this plan."""
        self.refused: list[Refusal] = []
        self.starved: list[Request] = []
        """Requests that had credit when they were queued and have none now."""
        self.stranded: list[Request] = []
        """Requests that no worker in the fleet serves. They wait outside the queue until the fleet changes."""
        self.wanted: list[Request] = []
        """Requests whose grammar the worker must compile."""
        self._serves_urgent = False
        """Whether memory becomes free for a request that has preempted others. No other request may take this
        memory.
        """
        self._is_copying = False
        """Whether a request waits for the rest of its prefix, which later plans copy. No other request overtakes it."""
        self.lacks_row = False
        """Whether a request could start if one more row were free."""
        self.obstacle: WaitReason | None = None
        """Why no further request is admitted; None if none is left, or the step's budget is used up."""
        self._looked_for_suspects = False
        self._is_assigned = False
        """Whether the last request taken was assigned to this worker."""
        self._has_found_first = False
        """Whether the first requests were checked for memory, because shorter ones may overtake them."""
        self._first: Request | None = None
        """The first request with room. A shorter request overtakes it only if this room remains free."""

    def next(self) -> tuple[Request, Room] | None:
        """Return the next request to admit and the room for its KV, or None.

        A draining worker may take back its former requests (`Backlog.returns_to`).
        """
        return self._next(self._take)

    def next_ahead(self, place: Place) -> tuple[Request, Room] | None:
        """Like `next`, but only for requests ahead of `place`. The policy must have keys."""
        return self._next(lambda: self._backlog.take_ahead(self._worker, place), all_of_them=False)

    def next_short(self, rest: int | None) -> tuple[Request, Room] | None:
        """Return the shortest request and the memory for its KV if it has fewer tokens than `rest`; otherwise None.

        If groups of requests take turns, the next group's first request counts as the shortest. Otherwise, the shortest
        request overtakes higher-ranked requests, so it must leave a row and the memory that the first of them needs.
        Requests that lack memory are determined first, because they must not be overtaken too often.
        """
        is_half_full = self._num_admitted >= MAX_ADMITTED // 2 or self._num_bytes >= MAX_ADMITTED_BYTES // 2
        if is_half_full or self._worker.draining or self._worker.rows.num_running >= self._max_running:
            return None
        return self._next(lambda: self._take_short(rest), all_of_them=False)

    def _take_short(self, rest: int | None) -> Request | None:
        if not self._backlog.serves_by_length:
            request = self._take_first()
            if request is not None and rest is not None and len(request.tokens) >= rest:
                self._backlog.put_back(request)
                return None
            return request
        if not self._has_found_first:
            self._has_found_first = True
            self._first = self._take_first()
            if self._first is not None:
                self._backlog.put_back(self._first)
        request = self._backlog.take_short(self._worker, rest) if self._may_look_further() else None
        if request is None:
            return None
        if request is self._first:
            self._first, self._has_found_first = None, False
        elif self._first is not None and not self._leaves_room(request, self._first):
            self._backlog.put_back(request)
            return None
        return request

    def _next(self, take: Callable[[], Request | None], *, all_of_them: bool = True) -> tuple[Request, Room] | None:
        """Return the next request from `take` that can start, and the memory for its KV; otherwise None.

        Args:
            take: takes a request out of the backlog.
            all_of_them: whether no request is left to wait when `take` returns None.
        """
        gate = self._worker.gate
        while self._may_look_further():
            if not gate.is_always_open and self._is_gate_closed():
                self.obstacle = WaitReason.BATCH
                return None
            if not self._looked_for_suspects:
                self._look_for_suspects()
                continue
            self._is_assigned = False
            request = take()
            if request is None:
                if all_of_them:
                    gate.close()
                return None
            if request.faults.suspect:
                self._backlog.put_back(request)  # The request became a suspect request while it waited.
                continue
            if _requeue_if_late(request, self._backlog, self._now):
                self._num_late += 1
                continue
            if not self._is_eligible(request):
                continue
            if not gate.is_always_open and not gate.admits(
                len(request.tokens), num_running=self._worker.rows.num_running, now=self._now
            ):
                request.waits_for(WaitReason.BATCH, self._now)
                self.obstacle = WaitReason.BATCH
                self._looked_past.append(request)
                return None
            if self._worker.rows.num_running >= self._max_running:
                request.waits_for(WaitReason.ROWS, self._now)
                self._looked_past.append(request)
                self.lacks_row = True
                self.obstacle = WaitReason.ROWS
                return None
            room = self._room(request)
            if room is not None:
                self._admitted(request)
                return request, room
        if self._overtakable and all_of_them:
            self.obstacle = self._overtakable[0].wait.reason
        return None

    def _is_gate_closed(self) -> bool:
        worker, num_waiting = self._worker, self._backlog.num_startable
        return num_waiting > 0 and not worker.gate.is_open(
            num_running=worker.rows.num_running,
            num_waiting=num_waiting,
            now=self._now,
            prefill_s=worker.costs.expected_s(worker.prefill),
            num_assigned=self._backlog.num_assigned(worker),
        )

    def _take_first(self) -> Request | None:
        """Take the first request with room, or return None; requests before it that lack memory wait."""
        while self._may_look_further():
            request = self._backlog.take(self._worker, self._cached_tokens)
            if request is None:
                return None
            if request.faults.suspect:
                self._backlog.put_back(request)
                continue
            if _requeue_if_late(request, self._backlog, self._now):
                self._num_late += 1
                continue
            if not self._is_eligible(request):
                continue
            worker = self._worker
            if find_room(worker, request, NOTHING_CACHED) or find_room(
                worker, request, worker.prefixes.match_on_device(request)
            ):
                return request
            request.waits_for(WaitReason.MEMORY, self._now)
            self._overtakable.append(request)
        return None

    def _leaves_room(self, request: Request, first: Request) -> bool:
        """Return whether a row and memory are left for `first` if `request` is admitted."""
        worker = self._worker
        if self._max_running - worker.rows.num_running < 2:
            return False
        rows, block_size = worker.rows, worker.rows.block_size
        whole, worst = -(-len(request.tokens) // block_size), -(-(worker.limit_of(request) - 1) // block_size)
        in_windows = sum(worker.num_window_blocks(each, 0) for each in (request, first))
        most_in_windows = sum(worker.num_window_blocks(each, 0, longest=True) for each in (request, first))
        worst_of_both = worst - (1 - worker.limit_of(first)) // block_size + most_in_windows
        growth = max(0, worst - whole)
        growth += worker.num_window_blocks(request, 0, longest=True) - worker.num_window_blocks(request, 0)
        num_blocks = whole - (-len(first.tokens)) // block_size + in_windows
        num_available = worker.pool.num_available
        for is_cached in (False, True):
            if is_cached:
                # Only search for cached blocks if they matter.
                matches = [(each, worker.prefixes.match_on_device(each)) for each in (request, first)]
                num_blocks -= in_windows + sum(len(match.blocks) for _, match in matches)
                num_blocks += sum(worker.num_window_blocks(each, len(match.blocks)) for each, match in matches)
                shared = (worker.prefixes.shared_blocks(match) for _, match in matches)
                num_available -= sum(worker.pool.count_idle(blocks) for blocks in shared)
            if worker.capacity.admits(
                rows,
                num_new=num_blocks,
                worst_blocks=worst_of_both,
                num_available=num_available,
                growth=growth,
            ):
                return True
        return False

    def next_suspect(self) -> tuple[Request, Room] | None:
        """Return a suspect request that can start now and the memory for its KV; other suspects keep their places.

        The gate was open when the trial became due. In batch modes, a suspect forms a separate batch.
        """
        num_running = self._worker.rows.num_running
        if self._worker.draining or num_running >= self._max_running:
            return None
        if num_running and self._config.batching.mode != "continuous":
            return None
        for _ in range(MAX_OVERTAKING_TRIES):
            request = self._backlog.take_suspect()
            if request is None:
                return None
            if not request.faults.suspect:
                self._backlog.put_back(request)
                continue
            if not self._is_eligible(request):
                continue
            room = self._suspect_room(request)
            if room is not None:
                self._worker.gate.close()
                self._overtake(request)
                self._backlog.withdraw(request)
                return request, room
            self._overtakable.append(request)
            if self._is_at_bound():
                return None
        return None

    def close(self) -> None:
        """Put back the requests that could not start, and choose the grammars to compile next."""
        for request in self._overtakable + self._looked_past:
            self._backlog.put_back(request)
        if not self._worker.draining:
            self.wanted = grammars_to_compile(self._worker, self._backlog)

    def _take(self) -> Request | None:
        worker, placement = self._worker, self._placement
        request = self._backlog.take_assigned(worker)
        self._is_assigned = request is not None
        has_row = worker.rows.num_running < self._max_running
        if request is None:
            request = self._backlog.take(worker, self._cached_tokens if has_row else None)
        if request is None and placement is not None and has_row and not worker.draining:
            request = self._backlog.take_for_prefix_elsewhere(
                worker, lambda waiting, other: placement.cost(worker, waiting) < placement.cost(other, waiting)
            )
        return request

    def _cached_tokens(self, request: Request) -> int:
        """Return the number of the request's cached tokens.

        It is looked up at most once per plan, because `lpm` ranks requests by this number.
        """
        num_tokens = self._ranked.get(request.sequence)
        if num_tokens is None:
            num_tokens = self._ranked[request.sequence] = self._worker.prefixes.cached_tokens(request)
        return num_tokens

    def _may_look_further(self) -> bool:
        return (
            self._num_bytes < MAX_ADMITTED_BYTES
            and self._num_admitted < MAX_ADMITTED
            and self._num_looked_past < MAX_LOOKED_PAST
            and self._num_late < MAX_LATE
            and len(self._overtakable) < MAX_OVERTAKING_TRIES
            and not self._serves_urgent
            and not self._is_copying
            and not self._is_at_bound()
        )

    def _is_at_bound(self) -> bool:
        """Return whether a skipped request has reached the bound on overtaking."""
        return bool(self._overtakable) and any(each.wait.overtaken >= MAX_OVERTAKEN for each in self._overtakable)

    def _is_eligible(self, request: Request) -> bool:
        """Return whether a request may start if there is room; if not, move it to the place where it must wait."""
        if request.allowed <= len(request.tokens):
            self._backlog.withdraw(request)
            self.starved.append(request)
            return False
        can_serve = self._backlog.can_serve(self._worker, request)
        is_served = can_serve or self._backlog.is_served(request)
        if not is_served and (request.under_way or request.spec.model not in ("", self._worker.model.fingerprint)):
            self._backlog.withdraw(request)
            self.stranded.append(request)
            return False
        refusal = self._refusal(request, is_served=is_served)
        if refusal is not None:
            self._backlog.withdraw(request)
            self.refused.append(refusal)
            return False
        if not self._tenants.may_run(request, self._now):
            self._backlog.hold_for_tenant(request, self._now)
        elif request.wait.behind is not None and request.wait.behind in self._overtakable:
            # The blocks released by this request are reserved for the request that preempted it. Lower-ranked requests
            # must not take them.
            self._looked_past.append(request)
            self._serves_urgent = True
        elif request.unsettled or not can_serve:
            request.waits_for(WaitReason.ANSWER if request.unsettled else WaitReason.ELSEWHERE, self._now)
            self._looked_past.append(request)
        elif not self._worker.grammars.is_ready(request.grammar_key):
            self._await_grammar(request)
        else:
            return True
        self._num_looked_past += 1
        return False

    def _await_grammar(self, request: Request) -> None:
        """Hold a request for its grammar, or assign it to another worker that has the grammar and room."""
        other = None
        if self._placement is not None and request.wait.num_assigned < MAX_ASSIGNED and not request.faults.suspect:
            other = self._placement.with_room(self._worker, request)
        if other is not None:
            self._assign(request, other)
        else:
            request.waits_for(WaitReason.GRAMMAR, self._now)
            self._backlog.hold_for_grammar(request)

    def _room(self, request: Request) -> Room | None:
        """Return the memory for the request's KV, or None.

        None means that the request goes to another worker, waits for its prefix, or lacks memory.
        """
        worker = self._worker
        match = worker.prefixes.match(request)
        if len(match.on_disk) and not worker.draining:
            num_workers = self._placement.num_workers if self._placement is not None else 1
            worker.prefixes.load(
                request,
                match,
                self._now,
                num_started=worker.prefill_backlog(),
                num_competing=self._backlog.competing_tokens // num_workers,
            )
        if not worker.draining and waits_for_prefix(worker, request, match):
            reason = WaitReason.BOUNDARY if worker.prefixes.has_boundaries else WaitReason.PREFIX
            is_read = not worker.pool.cache.is_pending(match.next_key)
            request.waits_for(WaitReason.DISK if is_read else reason, self._now)
            self._backlog.hold_for_prefix(request, worker, match.next_key)
            self._num_looked_past += 1
            return None
        room = self._found_room(request, match)
        if room is None:
            return None
        if self._placement is not None and request.wait.num_assigned < MAX_ASSIGNED and not self._is_assigned:
            other = self._placement.better_than(worker, self._load, request, worker.prefixes.num_cached(match))
            if other is not None:
                self._assign(request, other)
                self._num_looked_past += 1
                return None
        needs_copies = len(match.host) or len(match.host_tail)
        return self._restored(request, match, room) if needs_copies and self._copies is not None else room

    def _assign(self, request: Request, other: Worker) -> None:
        # Counted here, because the other worker's plan admits the request first and may not look at those before it.
        self._overtake(request)
        self._backlog.assign(request, other, self._now)

    def _restored(self, request: Request, match: Match, room: Room) -> Room | None:
        """Copy the part of a request's prefix that is in host memory; None if the request waits for the rest."""
        assert self._copies is not None
        on_device = self._copies.restore(request, match)
        if on_device is None:
            request.waits_for(WaitReason.COPY, self._now)
            self._looked_past.append(request)
            self._is_copying = True
            return None
        if on_device.num_blocks < match.num_blocks:
            return self._found_room(request, on_device)  # Computing the rest is faster than copying it.
        num_copied = len(on_device.blocks) - len(match.blocks)
        window = None
        if room.window is not None and self._worker.windows is not None:
            window = room.window._replace(tail=self._worker.windows.tail_of(on_device.blocks))
        return Room(on_device.blocks, room.num_new - num_copied, window=window)

    def _found_room(self, request: Request, match: Match) -> Room | None:
        room = find_room(self._worker, request, match)
        if room is None:
            request.waits_for(WaitReason.MEMORY, self._now)
            self._overtakable.append(request)
        return room

    def _look_for_suspects(self) -> None:
        """Schedule a trial if a suspect request fits now, so that the next plan contains it alone.

        Others may overtake it.
        """
        self._looked_for_suspects = True
        if self._worker.draining:
            return
        for _ in range(MAX_OVERTAKING_TRIES):
            suspect = self._backlog.take_suspect()
            if suspect is None:
                return
            if not suspect.faults.suspect:
                self._backlog.put_back(suspect)  # The suspect request was cleared while it waited.
                continue
            if not self._is_eligible(suspect):
                continue
            suspect.waits_for(WaitReason.ALONE, self._now)
            self._overtakable.append(suspect)
            if not self._worker.trials.is_due and self._suspect_room(suspect) is not None:
                self._worker.trials.is_due = True

    def _suspect_room(self, request: Request) -> Room | None:
        worker = self._worker
        if worker.rows.num_running >= self._max_running:
            return None
        return find_room(worker, request, worker.prefixes.match_on_device(request))

    def _admitted(self, request: Request) -> None:
        self._backlog.admitted(request, self._worker)
        self._num_admitted += 1
        rows, windows = self._worker.rows, self._worker.windows
        num_entries = 0 if windows is None else windows.max_entries(len(request.tokens))
        self._num_bytes += admission_bytes(request, rows.block_size, num_entries)
        self._load += DECODE_COST  # This step computes the request's prompt, or the request used up the budget.
        self._worker.gate.admitted(len(request.tokens), self._now)
        if not self._is_assigned:
            self._overtake(request)

    def _overtake(self, request: Request) -> None:
        """Count an admission or an assignment for all requests that it overtakes."""
        for each in self._overtakable:
            each.wait.overtaken += min(1.0, SMALL * len(request.tokens) / len(each.tokens))

    def _refusal(self, request: Request, *, is_served: bool) -> Refusal | None:
        """Return the reason why a request can never run or cannot finish in time; None if there is no such reason.

        A request that has started is only checked for invalid tokens.
        """
        worker = self._worker
        vocab_size = worker.model.vocab_size
        if worker.facts.holds(request.highest_token >= vocab_size):
            # Replayed requests have no token ids.
            found = next((token for token in request.tokens if not 0 <= token < vocab_size), -1)
            message = (
                f"token id {found} is outside the vocabulary [0, {vocab_size}); use the tokenizer of the served model"
            )
            return Refusal(request, EndReason.INVALID, message)
        if request.under_way:
            return None
        if not is_served:
            return Refusal(request, EndReason.INVALID, self._not_served(request))
        # An otherwise idle worker tries the request anyway, because the forecast may be wrong.
        if request.wait.must_start is None or self._now <= request.wait.must_start or not worker.rows.num_running:
            return None
        return Refusal(
            request,
            EndReason.DEADLINE,
            f"the deadline cannot be met: the forecast is {self._now - request.wait.must_start:.2f} s beyond it;"
            " allow more time or ask for less",
        )

    def _not_served(self, request: Request) -> str:
        """Return the message for a request that fits on no worker with its model.

        Drained workers do not count: they may never take requests again.
        """
        kinds = [kind for kind in self._backlog.kinds.all if kind.embeds or not request.spec.pooling]
        if not kinds:
            return "the served model makes no embeddings; use one that does"
        longest = max(kind.max_model_len for kind in kinds)
        return f"the prompt has {len(request.tokens)} tokens, the served model takes at most {longest - 1}; shorten it"


def grammars_to_compile(worker: Worker, backlog: Backlog) -> list[Request]:
    """Choose requests whose grammars the worker must compile next, and record that it was asked."""
    wanted = []
    while (request := backlog.next_grammar(worker)) is not None and worker.grammars.ask(request.grammar_key):
        backlog.compiling(request.grammar_key, worker)
        wanted.append(request)
    return wanted


def _requeue_if_late(request: Request, backlog: Backlog, now: float) -> bool:
    """Requeue a request that has missed its target; return False if it has not.

    The request then ranks behind requests that can still meet their targets.
    """
    if request.wait.latest_start is None or now <= request.wait.latest_start:
        return False
    request.late_rank = late_rank(request, now, backlog.policy.late_s(request))
    request.wait.latest_start = None
    backlog.missed_target(request)
    return True


def admission_bytes(request: Request, block_size: int, num_window_entries: int = 0) -> int:
    """Return an upper bound on the bytes that the request's admission takes in the plan's frame.

    Args:
        request: the request.
        block_size: tokens per block.
        num_window_entries: entries in its tables for windows.
    """
    num_tokens = len(request.tokens)
    columns = TOKEN_BYTES * (num_tokens - (-num_tokens // block_size))
    spec = request.spec
    columns += TOKEN_BYTES * num_window_entries
    return _OVERHEAD + columns + len(spec.sampling) + len(spec.grammar) + 4 * len(spec.request_id)


def _released_blocks(worker: Worker, rows: IndexArray, shared: IndexArray) -> Int32Array:
    """Return the number of blocks that each row alone would release, without the blocks in `shared`.

    Args:
        worker: the worker.
        rows: the rows, `[n]`.
        shared: the cached blocks that the urgent request shares and needs in any case.
    """
    tables = (worker.held_blocks(row) for row in rows.tolist())
    if len(shared):
        is_shared = np.zeros(worker.pool.num_blocks, np.bool_)
        is_shared[shared] = True
        tables = (table[~is_shared[table]] for table in tables)
    return np.array([worker.pool.count_sole(table) for table in tables], np.int32)


def _may_preempt(worker: Worker, backlog: Backlog, config: CoreConfig) -> bool:
    """Return whether a waiting request may preempt a running request."""
    is_off = config.policy_preemption == "off" or config.capacity == "guaranteed_no_evict"
    return not is_off and not worker.draining and backlog.num_ready > 0


def _lacks_only_room(
    worker: Worker, request: Request, placement: Placement | None, tenants: Tenants, now: float
) -> bool:
    """Return whether a request could start here with more room, and has no room on another worker either."""
    if request.unsettled or not worker.grammars.is_ready(request.grammar_key) or not tenants.may_run(request, now):
        return False
    return placement is None or placement.with_room(worker, request, assign=False) is None


def victim_for_tenant(
    worker: Worker, backlog: Backlog, placement: Placement | None, tenants: Tenants, config: CoreConfig, now: float
) -> tuple[Request | None, list[int]]:
    """Return the next waiting request under `fair` and the row to preempt for it; no row if this is not permitted.

    The request lacks a row, and its tenant would still have at most an eighth of the rows of the victim's tenant. A
    tenant with long requests therefore cannot hold all rows. After a preemption, tokens outside full cached blocks must
    be recomputed. The pause after each preemption limits this cost to a ninth of the worker's time, as long as the
    blocks stay cached.
    """
    rows = worker.rows
    if not _may_preempt(worker, backlog, config) or now < worker.next_row_for_tenant:
        return None, []
    if not backlog.policy.is_by_turns or rows.num_running < min(config.max_num_seqs, rows.max_rows):
        return None, []
    request = backlog.take(worker, None)
    if request is None:
        return None, []
    backlog.put_back(request)
    most = rows.num_running / ROWS_PER_ROW
    num_mine = tenants.num_running(request.spec.tenant) + 1
    if num_mine > most or config.policy_of(request.spec.request_class) != "fair":
        return None, []
    if find_room(worker, request, worker.prefixes.match_on_device(request)) is None:
        return None, []
    if not _lacks_only_room(worker, request, placement, tenants, now):
        return None, []
    has_progress = rows.committed - rows.num_prompt > rows.preempted_at
    place, victims = backlog.policy.place(request), []
    for row in np.flatnonzero((rows.state == DECODE) & has_progress).tolist():
        other = rows.requests[row]
        assert other is not None
        if (
            tenants.num_running(other.spec.tenant) >= ROWS_PER_ROW * num_mine
            and config.same_class(request.spec.request_class, other.spec.request_class)
            and place < backlog.policy.place(other)
        ):
            victims.append(row)
    if not victims:
        return None, []
    victim = min(victims, key=lambda row: int(rows.committed[row]))
    num_lost = int(rows.committed[victim])
    if worker.prefixes.enabled:
        num_lost %= rows.block_size
    worker.next_row_for_tenant = now + _RECOMPUTE_PAUSE * num_lost * worker.costs.prompt_token_s
    return request, [victim]


def victims_for_urgent(
    worker: Worker, backlog: Backlog, placement: Placement | None, tenants: Tenants, config: CoreConfig, now: float
) -> tuple[Request | None, list[int]]:
    """Return the next waiting request and the rows to preempt for it; no rows if too few rank far enough behind."""
    if not _may_preempt(worker, backlog, config) or backlog.num_assigned(worker):
        return None, []
    policies = {config.policy, *(each.policy for each in config.classes.values())}
    if policies.isdisjoint(PREEMPTIVE_POLICIES):
        return None, []
    request = backlog.take(worker, worker.prefixes.cached_tokens)
    if request is None or _requeue_if_late(request, backlog, now):
        return None, []
    backlog.put_back(request)
    if config.policy_of(request.spec.request_class) not in PREEMPTIVE_POLICIES:
        return None, []
    rows, pool = worker.rows, worker.pool
    need_row = rows.num_running >= min(config.max_num_seqs, rows.max_rows)
    match = worker.prefixes.match_on_device(request)
    cached = worker.prefixes.shared_blocks(match)
    num_new = -(-len(request.tokens) // rows.block_size) - len(match.blocks)
    num_new += worker.num_window_blocks(request, len(match.blocks))
    # Retired blocks become available without preemption when the result arrives.
    num_available = pool.num_available - pool.count_idle(cached) + pool.num_retired
    need_blocks = max(0, num_new + worker.capacity.reserve(rows) - num_available)
    if not (need_row or need_blocks) or not _lacks_only_room(worker, request, placement, tenants, now):
        return None, []
    behind = backlog.policy.rank(request) + config.preempt_threshold
    difference = config.preempt_priority_difference
    has_progress = rows.committed - rows.num_prompt > rows.preempted_at
    may_pause = np.flatnonzero((rows.state == DECODE) & (rows.rank > behind) & has_progress)
    if difference and config.policy_of(request.spec.request_class) == "priority":
        most = request.spec.priority - difference
        runs = ((row, rows.requests[row]) for row in may_pause.tolist())
        may_pause = np.array([row for row, each in runs if each is not None and each.spec.priority <= most], np.intp)
    if config.classes:
        others = [rows.requests[row] for row in may_pause.tolist()]
        same = [
            config.same_class(request.spec.request_class, other.spec.request_class)
            for other in others
            if other is not None
        ]
        may_pause = may_pause[np.array(same, np.bool_)]
    return request, choose_victims(
        Candidates(
            rows=may_pause,
            ranks=rows.rank[may_pause],
            sequences=rows.sequence[may_pause],
            num_blocks=_released_blocks(worker, may_pause, cached),
            num_computed=rows.committed[may_pause],
        ),
        need_blocks=need_blocks,
        rule=config.victim_rule,
        threshold=config.preempt_threshold,
    )
