"""Which waiting requests a worker takes in now, and whom it pauses for an urgent one.

A request that does not fit now may be overtaken by smaller ones, by at most `MAX_OVERTAKEN` of them over its whole
wait; after that nothing is admitted before it. So neither does a large request block the others for good, nor do they
starve it. A request whose prefix another one is computing waits for it, block by block, for at most
`MAX_PREFIX_WAITS` plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.config import PREEMPTIVE_POLICIES, CoreConfig
from scheduler_svc.core.placement import Placement, Room, find_room
from scheduler_svc.core.records import EndReason
from scheduler_svc.core.request import Request
from scheduler_svc.core.rows import DECODE
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.victims import Candidates, choose_victims
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import Match, Worker

MAX_ADMITTED_TOKENS = 1 << 20
"""Bounds a plan in bytes: after a loss many long prompts may come at once."""
MAX_OVERTAKEN = 16
"""How many later requests may be admitted before one that does not fit."""
MAX_OVERTAKING_TRIES = 8
"""How many requests that cannot start are looked past in one step."""
MAX_ELSEWHERE = 256
"""How many requests are left to other workers, or wait for their grammar, in one step."""
MAX_LEFT_ELSEWHERE = 32
"""How many plans leave a request to other workers; after that whoever can takes it."""
MAX_PREFIX_WAITS = 256
"""How many plans a request waits for a prefix that another request is computing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A waiting request that this worker could never run, or not in time."""

    request: Request
    reason: EndReason
    message: str


class Admission:
    """The admissions of one worker's next plan. `next` until it says None, then `close`."""

    def __init__(
        self,
        worker: Worker,
        fleet: Sequence[Worker],
        waiting: WaitingQueue,
        tenants: Tenants,
        config: CoreConfig,
        now: float,
    ) -> None:
        self._worker = worker
        # A worker that is drained may never take anything again.
        self._longest = max((each.max_model_len for each in fleet if not each.draining), default=0)
        self._embeds = any(each.model.hidden_size for each in fleet)
        """A worker makes embeddings; one that speaks an older version of the protocol does not."""
        self._placement = Placement(worker, fleet, config.max_num_seqs) if len(fleet) > 1 else None
        self._waiting = waiting
        self._tenants = tenants
        self._config = config
        self._now = now
        self._max_running = min(config.max_num_seqs, worker.rows.max_rows)
        self._passed: list[Request] = []
        """Requests that cannot start now and that others were allowed to pass."""
        self._elsewhere: list[Request] = []
        """Requests that are better placed on another worker."""
        self._unprepared: list[Request] = []
        """Requests whose grammar this worker has not compiled yet."""
        self.wanted: list[Request] = []
        """Those of them whose grammar it is to be asked for."""
        self._num_tokens = 0
        self._ranked: dict[int, int] = {}
        """By sequence number: cached tokens, as they were when the request was first ranked for this plan."""
        self.refused: list[Refusal] = []
        self.starved: list[Request] = []
        """Requests that had credit when they were queued and have none now."""

    def next(self) -> tuple[Request, Room] | None:
        """The next request to take in and where its KV goes, or None."""
        gate = self._worker.gate
        if self._worker.draining:
            return None
        while self._may_look_further():
            num_waiting = len(self._waiting) + len(self._passed) + len(self._elsewhere) + len(self._unprepared)
            if not num_waiting or not gate.is_open(
                num_running=self._worker.rows.num_running, num_waiting=num_waiting, now=self._now
            ):
                return None
            request = self._waiting.take(self._cached_tokens)
            if request is None:
                gate.close()
                return None
            if request.allowed <= len(request.tokens):
                self.starved.append(request)
                continue
            refusal = self._refusal(request)
            if refusal is not None:
                self.refused.append(refusal)
                continue
            if not gate.admits(len(request.tokens)):
                gate.close()
                self._passed.append(request)
                return None
            if request.suspect:
                # It is tried alone, in the next plan if it would fit now; until then it lets others pass.
                if self._is_prepared(request):
                    self._worker.trial_due |= self._room(request) is not None
                    self._passed.append(request)
                continue
            if self._is_for_another(request):
                self._elsewhere.append(request)
                continue
            if not self._is_prepared(request):
                continue
            room = self._room(request)
            if room is not None:
                self._admitted(request)
                return request, room
            self._passed.append(request)
            if self._worker.rows.num_running >= self._max_running:
                return None
        return None

    def next_suspect(self) -> tuple[Request, Room] | None:
        """A suspect that may start now and where its KV goes; the others keep their places.

        The gate was open when the trial was found to be due; where requests run in batches, a suspect is one by itself.
        """
        num_running = self._worker.rows.num_running
        if self._worker.draining or num_running >= self._max_running:
            return None
        if num_running and self._config.batching.mode != "continuous":
            return None
        while len(self._passed) < MAX_ELSEWHERE and not self._is_at_bound():
            request = self._waiting.take(self._worker.cached_tokens)
            if request is None:
                return None
            may_run = (
                request.suspect
                and request.allowed > len(request.tokens)
                and self._worker.grammars.is_ready(request.grammar_key)
                and self._refusal(request) is None
            )
            room = self._room(request) if may_run else None
            if room is not None:
                self._worker.gate.close()
                self._pass_by()
                return request, room
            self._passed.append(request)
        return None

    def close(self) -> None:
        """Gives back to the queue what could not start."""
        for request in self._passed + self._elsewhere + self._unprepared:
            self._waiting.give_back(request)

    def _cached_tokens(self, request: Request) -> int:
        """What an order by cached prefixes goes by; looked up once per plan, however many the plan admits."""
        num_tokens = self._ranked.get(request.sequence)
        if num_tokens is None:
            num_tokens = self._ranked[request.sequence] = self._worker.cached_tokens(request)
        return num_tokens

    def _may_look_further(self) -> bool:
        return (
            self._num_tokens < MAX_ADMITTED_TOKENS
            and len(self._elsewhere) + len(self._unprepared) < MAX_ELSEWHERE
            and len(self._passed) < MAX_OVERTAKING_TRIES
            and not self._is_at_bound()
        )

    def _is_at_bound(self) -> bool:
        """Whether somebody may not be passed once more."""
        return bool(self._passed) and any(request.overtaken >= MAX_OVERTAKEN for request in self._passed)

    def _is_for_another(self, request: Request) -> bool:
        """Whether another worker takes the request soon and does less work for it."""
        if self._placement is None or request.unsettled or request.left_elsewhere >= MAX_LEFT_ELSEWHERE:
            return False
        if self._placement.is_mine(request):
            return False
        request.left_elsewhere += 1
        return True

    def _is_prepared(self, request: Request) -> bool:
        """Whether the worker has compiled the request's grammar; if not, the request waits, and it is asked to."""
        grammars = self._worker.grammars
        if grammars.is_ready(request.grammar_key):
            return True
        self._unprepared.append(request)
        if grammars.ask(request.grammar_key):
            self.wanted.append(request)
        return False

    def _room(self, request: Request) -> Room | None:
        worker = self._worker
        if request.unsettled or worker.rows.num_running >= self._max_running:
            return None
        if len(request.tokens) >= worker.max_model_len or (request.pooling and not worker.model.hidden_size):
            return None
        if not self._tenants.may_run(request, self._now):
            return None
        match = worker.match(request)
        return None if self._waits_for_prefix(request, match) else find_room(worker, request, match)

    def _admitted(self, request: Request) -> None:
        self._num_tokens += len(request.tokens)
        self._worker.gate.admitted(len(request.tokens), self._now)
        self._pass_by()

    def _pass_by(self) -> None:
        """Somebody is admitted before those that were passed."""
        for passed in self._passed:
            passed.overtaken += 1

    def _waits_for_prefix(self, request: Request, match: Match) -> bool:
        if match.swapped is not None or not self._worker.pool.cache.is_pending(match.next_key):
            return False
        request.prefix_waits += 1
        return request.prefix_waits <= MAX_PREFIX_WAITS

    def _refusal(self, request: Request) -> Refusal | None:
        worker = self._worker
        num_tokens = len(request.tokens)
        if num_tokens >= self._longest:
            # What has begun elsewhere, on a larger worker, ends as at any other end of the context.
            reason = EndReason.LENGTH if request.num_generated else EndReason.INVALID
            message = f"the prompt has {num_tokens} tokens, the served model takes at most {self._longest - 1}"
            return Refusal(request, reason, message)
        vocab_size = worker.model.vocab_size
        if request.highest_token >= vocab_size:
            found = next(token for token in request.tokens if not 0 <= token < vocab_size)
            message = f"token ids must lie in [0, {vocab_size}), found {found}"
            return Refusal(request, EndReason.INVALID, message)
        if request.pooling and not self._embeds:
            return Refusal(request, EndReason.INVALID, "the served model makes no embeddings")
        if request.latest_start is None and request.must_start is None:
            return None
        # A worker that has nothing else to do may as well try: the forecast may be wrong.
        is_busy = worker.rows.num_running > 0
        by_target = self._config.policy_of(request.request_class) == "edf"
        latest_start = request.latest_start if by_target else request.must_start if is_busy else None
        if latest_start is not None and self._now > latest_start and not request.attempts:
            return Refusal(
                request,
                EndReason.DEADLINE,
                f"the deadline cannot be met: the forecast is {self._now - latest_start:.2f} s beyond it;"
                " allow more time or ask for less",
            )
        return None


def victims_for_urgent(worker: Worker, waiting: WaitingQueue, config: CoreConfig) -> list[int]:
    """The rows to pause so that the next waiting request fits, if enough of them rank far enough behind it."""
    preempts = config.policy_preemption != "off" and config.capacity != "guaranteed_no_evict"
    if not preempts or worker.draining or not len(waiting):
        return []
    policies = {config.policy, *(each.policy for each in config.classes.values())}
    if policies.isdisjoint(PREEMPTIVE_POLICIES):
        return []
    request = waiting.take(worker.cached_tokens)
    if request is None:
        return []
    waiting.give_back(request)
    if config.policy_of(request.request_class) not in PREEMPTIVE_POLICIES:
        return []
    rows, pool = worker.rows, worker.pool
    need_row = rows.num_running >= min(config.max_num_seqs, rows.max_rows)
    num_blocks = -(-len(request.tokens) // rows.block_size)
    # Blocks that wait for an answer come back without anybody being paused.
    need_blocks = max(0, num_blocks - pool.num_available - pool.num_retired)
    if request.unsettled or not (need_row or need_blocks) or not worker.grammars.is_ready(request.grammar_key):
        return []
    behind = waiting.rank(request) + config.preempt_threshold
    has_progress = rows.committed - rows.num_prompt > rows.preempted_at
    may_pause = np.flatnonzero((rows.state == DECODE) & (rows.rank > behind) & has_progress)
    if config.classes:
        others = [rows.requests[row] for row in may_pause.tolist()]
        same = [config.same_class(request.request_class, other.request_class) for other in others if other is not None]
        may_pause = may_pause[np.array(same, np.bool_)]
    return choose_victims(
        Candidates(
            rows=may_pause,
            ranks=rows.rank[may_pause],
            sequences=rows.sequence[may_pause],
            num_blocks=rows.capacity[may_pause] // rows.block_size,
            num_computed=rows.committed[may_pause],
        ),
        need_blocks=need_blocks,
        rule=config.victim_rule,
        threshold=config.preempt_threshold,
    )
