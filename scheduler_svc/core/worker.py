"""One worker in one epoch, as the scheduler sees it: pool, rows, steps in flight, timing.

A row that a request leaves is handed out again at once (a plan's leaves come before its admissions), but steps in
flight may still sample it. Those answers are told apart by the row's generation; `departed` remembers for whom they
are until the last such step is answered.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.arrays import NO_INDICES, IndexArray, Int32Array, any_of
from scheduler_svc.core.batching import BatchGate
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.capacity import Capacity
from scheduler_svc.core.events import ModelFacts
from scheduler_svc.core.grammars import Grammars
from scheduler_svc.core.partial_blocks import PartialMatch
from scheduler_svc.core.records import Peer
from scheduler_svc.core.request import Request, RequestState
from scheduler_svc.core.rows import PREFILL, RowTable
from scheduler_svc.core.step_clock import StepClock
from scheduler_svc.core.suspicion import PROBATION, acquit
from scheduler_svc.core.swapping import BlockCopy, SwappedKV, SwapSpace
from shared.prefix_keys import KEY_BYTES, BlockKey, following_keys, root_key


@dataclass(slots=True)
class StepInFlight:
    """A plan that was sent and not answered."""

    step: int
    rows: IndexArray
    """Rows that sample in it, ascending."""
    generations: Int32Array
    """Their generations when it was planned."""
    prefilled: list[int]
    """Those of the rows whose first token of this attempt it is."""
    pooled: list[tuple[int, int]]
    """(row, generation) of the embeddings that are complete with it; their requests have left the rows."""
    num_tokens: int
    num_prefill_tokens: int
    cost: int
    """What it takes of the token budget; by it the clock learns."""
    started: float
    """When it began on the worker, as far as is known: sent, or its predecessor answered."""
    successor_due: float
    """When the plan after it should go out."""
    goes_on: bool
    """Whether there was enough to do for it to be planned before its predecessor was answered."""
    chunk_rows: list[int]
    """Rows with a chunk of their prompt in it."""
    solo: Request | None
    """The suspect, if it holds nothing else."""
    copy_ids: list[int]
    """Block copies in it; all are done when it is answered."""
    allowance: float
    """How long it may take from when it began, in seconds."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A suspect that runs alone."""

    request: Request
    row: int
    generation: int
    num_generated: int
    """When it began."""


@dataclass(slots=True)
class Departure:
    """A request that left a row which steps up to `last_step` may still sample."""

    request: Request
    last_step: int
    blocks: IndexArray
    """What it held; not to be trusted if the row turns out to have failed."""
    num_tokens: int
    """Leading tokens whose KV they hold; a token that is sampled late proves it."""


class Match(NamedTuple):
    """What a worker has of a request's KV already."""

    blocks: IndexArray
    """Cached blocks that it can share."""
    partial: PartialMatch | None = None
    """The one that it can begin its next block with."""
    swapped: SwappedKV | None = None
    """All of it, in the worker's host memory; then nothing else counts."""
    next_key: BlockKey = b""
    """The key of the first full block that is not there; empty: there is no further one that could be."""


@dataclass(slots=True)
class WorkerCounters:
    """Totals of one epoch."""

    steps: int = 0
    scheduled_tokens: int = 0
    prompt_tokens: int = 0
    """Tokens of admitted sequences."""
    cached_tokens: int = 0
    """Those of them whose KV was in the prefix cache."""
    generated_tokens: int = 0
    discarded_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that was welcomed."""

    peer: Peer
    worker_id: str
    epoch: int
    model: ModelFacts
    max_tokens_per_step: int
    max_model_len: int
    """Longest sequence: the model's positions and the pool's size allow no more."""
    rows: RowTable
    pool: BlockPool
    clock: StepClock
    capacity: Capacity
    gate: BatchGate
    shares_prefixes: bool
    swap: SwapSpace
    protocol_version: int
    """Nothing that a newer one adds to plans is used with it."""
    device: str
    pid: int
    """Both as it said; for operators."""
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    departed: dict[tuple[int, int], Departure] = field(default_factory=dict)
    prefilling: list[int] = field(default_factory=list)
    """Rows in prefill, in order of arrival."""
    pending_leaves: list[int] = field(default_factory=list)
    """Rows to name as leaves in the next plan."""
    last_step: int = 0
    answered_step: int = 0
    last_tokens: int = 0
    compiling_until: float = 0.0
    trial: Trial | None = None
    trial_due: bool = False
    """A suspect waits that would fit: the next plan is its own, once nothing is in flight."""
    draining: bool = False
    """It takes nothing new."""
    grammars: Grammars = field(default_factory=Grammars)
    counters: WorkerCounters = field(default_factory=WorkerCounters)

    def vacate(self, row: int) -> Request:
        """Takes a request out of its row; blocks and answers in flight are accounted for. Returns the request."""
        return self._vacate(row, self.last_step)

    def swap_out(self, row: int) -> tuple[Request, BlockCopy]:
        """As `vacate`, but the plan being made copies the row's KV to the host first."""
        num_computed = self.rows.num_computed(row)
        num_blocks = -(-num_computed // self.rows.block_size)
        copy = self.swap.out(self.rows.blocks(row)[:num_blocks])
        # The plan being made still reads the blocks.
        request = self._vacate(row, self.last_step + 1)
        request.swapped = SwappedKV(epoch=self.epoch, host_blocks=copy.targets, num_tokens=num_computed)
        return request, copy

    def swapped_here(self, request: Request) -> SwappedKV | None:
        """The request's KV in this worker's host memory."""
        return request.swapped if request.swapped is not None and request.swapped.epoch == self.epoch else None

    def release_swapped(self, request: Request, *, last_step: int) -> None:
        """The request needs its host blocks no longer once `last_step` is answered."""
        swapped = self.swapped_here(request)
        if swapped is not None:
            self.swap.pool.release(swapped.host_blocks, last_step=last_step, answered_step=self.answered_step)
            request.swapped = None

    def _vacate(self, row: int, last_step: int) -> Request:
        rows, cache = self.rows, self.pool.cache
        if row in self.prefilling:
            self.prefilling.remove(row)
            cache.computes_next(row, b"")
        num_computed = rows.num_computed(row)
        is_proven = cache.partial is not None and rows.is_settled(row)
        request, blocks = rows.vacate(row)
        num_tokens = min(num_computed, len(request.tokens))
        if self.shares_prefixes:
            # What it has computed stays behind in the cache, generated tokens included.
            self._publish(row, request, blocks, num_tokens)
            if is_proven:
                self._prove(request, blocks, num_tokens)
        self.pool.release(blocks, last_step=last_step, answered_step=self.answered_step)
        self.pending_leaves.append(row)
        if self.in_flight:
            generation = rows.generation.item(row)
            self.departed[row, generation] = Departure(request, self.last_step, blocks, num_tokens)
            request.unsettled = True
        return request

    def shareable_keys(self, request: Request) -> bytes:
        """The joined keys of the request's leading full blocks that it could take from the cache.

        The last known token is always computed, since its logits are needed.
        """
        if not self.shares_prefixes or request.computes_whole_prompt:
            return b""
        return self._keys(request)[: KEY_BYTES * ((len(request.tokens) - 1) // self.rows.block_size)]

    def cached_tokens(self, request: Request) -> int:
        """How many of the request's tokens need not be computed here."""
        match = self.match(request)
        if match.swapped is not None:
            return match.swapped.num_tokens
        num_partial = match.partial.num_tokens if match.partial is not None else 0
        return len(match.blocks) * self.rows.block_size + num_partial

    def match(self, request: Request) -> Match:
        """What is here of the request's KV."""
        swapped = self.swapped_here(request)
        if swapped is not None:
            return Match(NO_INDICES, swapped=swapped)
        cache, keys = self.pool.cache, self.shareable_keys(request)
        blocks = cache.match(keys)
        next_key = keys[KEY_BYTES * len(blocks) : KEY_BYTES * (len(blocks) + 1)]
        if cache.partial is None or request.computes_whole_prompt:
            return Match(blocks, next_key=next_key)
        start = len(blocks) * self.rows.block_size
        end = min(start + self.rows.block_size, len(request.tokens) - 1)
        text = request.tokens[start:end].tobytes()
        partial = cache.match_partial(self._root_key(request), keys, len(blocks), text)
        return Match(blocks, partial, next_key=next_key)

    def prefill_backlog(self) -> int:
        """Prompt tokens of its rows that no plan holds yet."""
        rows = self.prefilling
        return int((self.rows.length[rows] - self.rows.computed[rows]).sum()) if rows else 0

    def publish_blocks(self, row: int, num_computed: int) -> None:
        """The plan being made computes the row's tokens up to `num_computed`: its full blocks are shareable."""
        if not self.shares_prefixes:
            return
        request = self.rows.requests[row]
        assert request is not None
        self._publish(row, request, self.rows.blocks(row), num_computed)
        start = KEY_BYTES * (num_computed // self.rows.block_size)
        is_complete = num_computed == len(request.tokens)
        self.pool.cache.computes_next(row, b"" if is_complete else self._keys(request)[start : start + KEY_BYTES])

    def prove_prefilled(self, rows: IndexArray) -> None:
        """The first tokens that these rows sampled are there: what the rows have published can be copied from."""
        for row in rows.tolist():
            request, num_blocks = self.rows.requests[row], int(self.rows.published[row])
            assert request is not None
            self._prove(request, self.rows.blocks(row)[:num_blocks], num_blocks * self.rows.block_size)

    def prove_departed(self, departure: Departure) -> None:
        """A token came from a row that its request has left: what it left behind can be copied from."""
        if self.pool.cache.partial is not None:
            self._prove(departure.request, departure.blocks, departure.num_tokens)

    def distrust(self, blocks: IndexArray) -> list[int]:
        """A row that wrote these blocks has failed; returns the rows that share any of them."""
        self.pool.distrust(blocks)
        tainted = np.zeros(self.pool.num_blocks, np.bool_)
        tainted[blocks] = True
        return [row for row in self.rows.occupied() if any_of(tainted[self.rows.blocks(row)])]

    def _publish(self, row: int, request: Request, blocks: IndexArray, num_computed: int) -> None:
        num_blocks = num_computed // self.rows.block_size
        if num_blocks > self.rows.published[row]:
            cache = self.pool.cache
            text = b"" if cache.partial is None else request.tokens[: num_blocks * self.rows.block_size].tobytes()
            cache.publish(self._keys(request)[: KEY_BYTES * num_blocks], blocks[:num_blocks], text)
            self.rows.published[row] = num_blocks

    def _prove(self, request: Request, blocks: IndexArray, num_tokens: int) -> None:
        """A token was sampled, and was finite, from the KV of the request's first tokens, which these blocks hold."""
        if self.pool.cache.partial is not None:
            text = request.tokens[:num_tokens].tobytes()
            self.pool.cache.prove(self._root_key(request), self._keys(request), text, blocks)

    def _root_key(self, request: Request) -> BlockKey:
        """The key before the request's first block."""
        return root_key(self.model.fingerprint, request.salt)

    def _keys(self, request: Request) -> bytes:
        """The joined keys of all full blocks of the request's tokens."""
        block_size = self.rows.block_size
        keys = request.keys.get(block_size, b"")
        num_keys = len(keys) // KEY_BYTES
        if len(request.tokens) // block_size > num_keys:
            root = keys[-KEY_BYTES:] or self._root_key(request)
            keys += following_keys(root, request.tokens[num_keys * block_size :].tobytes(), block_size)
            request.keys[block_size] = keys
        return keys

    @property
    def has_work(self) -> bool:
        """Whether something runs here, or there are rows to be told of that do no more."""
        return bool(self.rows.num_running or self.pending_leaves)

    def aboard(self) -> list[Request]:
        """The live requests that took part in steps in flight; some of them may only have been about to."""
        if (suspect := self.dies_of()) is not None:
            return [suspect] if suspect.state is not RequestState.FINISHED else []
        rows = {row for step in self.in_flight for row in (*step.rows.tolist(), *step.chunk_rows)}
        present = [self.rows.requests[row] for row in sorted(rows)]
        gone = [departure.request for departure in self.departed.values()]
        return [r for r in (*present, *gone) if r is not None and r.state is not RequestState.FINISHED]

    def dies_of(self) -> Request | None:
        """The suspect, if nothing else is being computed: whose doing it is if the worker dies now."""
        return self.in_flight[0].solo if len(self.in_flight) == 1 else None

    def judge(self) -> None:
        """Ends the trial of a suspect that has survived it, or that has left its row."""
        trial = self.trial
        if trial is None:
            return
        rows, row = self.rows, trial.row
        if rows.requests[row] is not trial.request or rows.generation[row] != trial.generation:
            self.trial = None
        elif rows.num_generated(row) - trial.num_generated >= PROBATION:
            self.end_trial()

    def end_trial(self) -> None:
        """The suspect has survived as far as it can be tried: it goes on with the others."""
        assert self.trial is not None
        acquit(self.trial.request)
        self.trial = None

    def step_deadline(self) -> float | None:
        """When the oldest step in flight is overdue, or None when nothing is in flight."""
        return (
            max(self.in_flight[0].started + self.in_flight[0].allowance, self.compiling_until)
            if self.in_flight
            else None
        )

    def plan_due(self, max_in_flight: int) -> float | None:
        """When the next plan should go out: 0 for at once, None for not before an answer."""
        if len(self.in_flight) >= max_in_flight:
            return None
        return self.in_flight[-1].successor_due if self.in_flight else 0.0

    def validate(self) -> None:
        """Checks rows, pool and their agreement."""
        self.rows.validate()
        self.pool.validate(self.rows.blocks(row) for row in range(self.rows.max_rows))
        assert len(self.prefilling) == len(set(self.prefilling)) == int((self.rows.state == PREFILL).sum())
        assert [entry.step for entry in self.in_flight] == list(range(self.answered_step + 1, self.last_step + 1))
        assert all(departure.last_step > self.answered_step for departure in self.departed.values())
