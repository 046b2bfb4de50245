"""The scheduler's view of one worker in one epoch: its identity, rows, blocks and steps in flight.

`cached_prefixes` finds what the worker's caches hold of a request. `prefix_publisher` adds what its rows have computed.
`trials` lets suspects run alone.

A vacated row can be reused immediately, because a plan vacates rows before it admits requests. Steps in flight may
still sample a token for the previous request, which the row's generation identifies. `departed` holds these requests
until the last such result arrives.
"""

import math
from collections import Counter, deque
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, Int32Array
from scheduler_svc.core.interface.events import ModelFacts
from scheduler_svc.core.interface.plan import BlockCopy
from scheduler_svc.core.interface.records import Peer, WaitReason
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.swapping import SwappedKV, SwapSpace
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.memory.window_blocks import WindowBlocks
from scheduler_svc.core.requests.request import Request, RequestState
from scheduler_svc.core.workers.batching import BatchGate
from scheduler_svc.core.workers.cached_prefixes import CachedPrefixes
from scheduler_svc.core.workers.capacity import Capacity
from scheduler_svc.core.workers.chunks import Pace
from scheduler_svc.core.workers.cost_model import NO_STEP, CostModel, StepShape
from scheduler_svc.core.workers.grammars import Grammars
from scheduler_svc.core.workers.kinds import Kind
from scheduler_svc.core.workers.plan_timing import PlanTiming
from scheduler_svc.core.workers.prefix_publisher import PrefixPublisher
from scheduler_svc.core.workers.rows import DECODE, PREFILL, RowTable
from scheduler_svc.core.workers.speculation import Speculation
from scheduler_svc.core.workers.steps_in_flight import Departure, StepInFlight
from scheduler_svc.core.workers.trials import Trials


@dataclass(slots=True)
class WorkerCounters:
    """Totals of one epoch."""

    steps: int = 0
    scheduled_tokens: int = 0
    decode_rows: int = 0
    """Number of decoding rows, summed over the steps; each is one of `scheduled_tokens`."""
    chunks: int = 0
    """Rows with a chunk of their prompt, summed over the steps."""
    prompt_tokens: int = 0
    """Tokens of admitted sequences, including tokens generated before."""
    cached_tokens: int = 0
    """Number of `prompt_tokens` whose KV was in the prefix cache."""
    restored_tokens: int = 0
    """Number of `prompt_tokens` whose KV was in host memory: of preempted requests, and cached blocks."""
    loaded_tokens: int = 0
    """Number of `prompt_tokens` whose KV was read from disk."""
    unusable_tokens: int = 0
    """Number of `prompt_tokens` that were computed again although their KV was cached, because no boundary follows."""
    generated_tokens: int = 0
    discarded_tokens: int = 0
    drafting_rows: int = 0
    """Rows that verified drafts, summed over the steps."""
    draft_tokens: int = 0
    """Draft tokens that rows verified."""
    accepted_draft_tokens: int = 0
    """Number of `draft_tokens` that were accepted."""
    preemptions: int = 0
    swapped: int = 0
    """Number of `preemptions` whose KV was copied to the host."""


@dataclass(slots=True, eq=False)
class Worker:
    """A worker with a valid epoch."""

    peer: Peer
    worker_id: str
    epoch: int
    model: ModelFacts
    max_tokens_per_step: int
    max_model_len: int
    """Longest sequence, tokens: limited by the model's positions and by the size of the pool."""
    rows: RowTable
    pool: BlockPool
    costs: CostModel
    timing: PlanTiming
    speculation: Speculation
    capacity: Capacity
    gate: BatchGate
    swap: SwapSpace
    protocol_version: int
    """Protocol version of this worker. Plans use no newer feature."""
    device: str
    cache_kinds: tuple[str, ...]
    """As in `WorkerHello`."""
    block_bytes: int
    """As in `WorkerHello`."""
    pid: int
    """Process ID as reported by the worker; for operators only."""
    facts: TokenFacts
    shares_prefixes: InitVar[bool]
    """Whether requests may use cached blocks, see `CachedPrefixes.enabled`."""
    checkpoints: StateCheckpoints | None = None
    """Checkpoints of recurrent states; None if the model has no such state, or the worker no room for checkpoints."""
    windows: WindowBlocks | None = None
    """Blocks of layers with a sliding window; None if the worker has one KV group."""
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    departed: dict[tuple[int, int], Departure] = field(default_factory=dict)
    prefilling: list[int] = field(default_factory=list)
    """Rows in prefill, in order of arrival."""
    pending_leaves: list[int] = field(default_factory=list)
    """Rows that the next plan names as leaves."""
    last_step: int = 0
    answered_step: int = 0
    last_tokens: int = 0
    compiling_until: float = 0.0
    pace: Pace = field(default_factory=Pace)
    next_row_for_tenant: float = -math.inf
    """Time from which on a tenant's request may be preempted because another tenant lacks a row."""
    starves: bool = False
    """Whether a plan has found a row without credit since the last check by `Timeouts`."""
    decoded_rows: IndexArray = field(default_factory=lambda: NO_INDICES)
    """The decode rows of the last plan."""
    decoded_context: int = 0
    """Total length of `decoded_rows`."""
    mean_chunks: float = 0.0
    """Smoothed budget tokens of the chunks of a step."""
    prefill: StepShape = NO_STEP
    """The newest completed step with prompt tokens."""
    obstacle: WaitReason | None = None
    """Why the last plan admitted none of the requests that still compete for the worker."""
    draining: bool = False
    """Whether the worker is draining and takes no new requests."""
    grammars: Grammars = field(default_factory=Grammars)
    counters: WorkerCounters = field(default_factory=WorkerCounters)
    prefixes: CachedPrefixes = field(init=False)
    publisher: PrefixPublisher = field(init=False)
    trials: Trials = field(init=False)
    kind: Kind = field(init=False)
    vocab_size: npt.NDArray[np.uint32] = field(init=False)
    """The model's vocabulary size as an array, because comparing with an array takes half the time."""

    def __post_init__(self, shares_prefixes: bool) -> None:
        self.prefixes = CachedPrefixes(
            enabled=shares_prefixes,
            epoch=self.epoch,
            model=self.model,
            block_size=self.rows.block_size,
            pool=self.pool,
            swap=self.swap,
            checkpoints=self.checkpoints,
            windows=self.windows,
            costs=self.costs,
            facts=self.facts,
        )
        self.publisher = PrefixPublisher(
            self.prefixes, self.rows, self.pool, self.checkpoints, self.windows, self.facts
        )
        self.trials = Trials(self.rows)
        self.vocab_size = np.array(self.model.vocab_size, np.uint32)
        self.kind = Kind(self.max_model_len, bool(self.model.hidden_size), self.model.fingerprint)

    @property
    def decode_step_s(self) -> float:
        """Expected time of a step with the current rows and without chunks, s; 0 before the first measurement."""
        rows = self.rows
        return self.costs.decode_s(rows.num_running or 1, rows.num_table_blocks * rows.block_size)

    def least_service_s(self, num_uncached: int, num_outputs: float) -> float:
        """Return a time that nearly all requests with so many uncached tokens and outputs take here.

        The running requests do not count, because they may end soon and steps with fewer rows are faster.
        """
        prefill, decode = StepShape(prompt_tokens=num_uncached), StepShape(1, context=num_uncached)
        num_steps = max(0.0, num_outputs - 1.0) / (1 + self.speculation.max_drafts)  # As if all drafts were accepted.
        return self.costs.least_s(prefill) + num_steps * self.costs.least_s(decode)

    def limit_of(self, request: Request) -> int:
        """Return the maximum number of tokens that the request can have here, including the prompt."""
        return min(request.limit, self.max_model_len)

    def vacate(self, row: int) -> Request:
        """Take a request out of its row and return it; account for its blocks and for results in flight."""
        self.capacity.released()
        return self._vacate(row, self.last_step)

    def preempt(self, row: int) -> Request:
        """Like `vacate`, but do not count the blocks as permanently released."""
        return self._vacate(row, self.last_step)

    def blocks_to_swap(self, row: int) -> IndexArray | None:
        """Return the blocks with the KV that a row needs to continue; None if some of it may be overwritten."""
        num_computed = self.rows.num_computed(row)
        blocks = self.rows.blocks(row)[: -(-num_computed // self.rows.block_size)]
        if self.windows is None:
            return blocks
        in_window = self.windows.present(row, num_computed, self._last_written(row, num_computed))
        return None if in_window is None else np.concatenate((blocks, in_window.ravel()))

    def swap_out(self, row: int, blocks: IndexArray) -> tuple[Request, BlockCopy]:
        """Preempt a row's request; the current plan first copies its KV and its recurrent state to the host.

        Args:
            row: the row.
            blocks: as from `blocks_to_swap`.
        """
        num_computed = self.rows.num_computed(row)
        copy = self.swap.out(blocks)
        # The current plan still reads these blocks.
        request = self._vacate(row, self.last_step + 1)
        state = None if self.swap.states is None else self.swap.states.take(self.last_step + 1)
        request.swapped = SwappedKV(epoch=self.epoch, host_blocks=copy.targets, num_tokens=num_computed, state=state)
        return request, copy

    def has_present_state(self, row: int) -> bool:
        """Return whether the worker has the state of the row's newest token when the steps in flight are done.

        With drafts in flight, that token is not known. After a rejected draft, the worker has an earlier state until
        the next step of the row. Therefore all rows that have verified drafts are excluded.
        """
        rows = self.rows
        return not (self.model.state_bytes and (rows.drafts.item(row) or rows.drafted.item(row)))

    def release_swapped(self, request: Request, *, last_step: int) -> None:
        """Release the request's host blocks once the result of `last_step` arrives."""
        swapped = self.prefixes.swapped_here(request)
        if swapped is not None:
            self.swap.pool.release(swapped.host_blocks, last_step=last_step, answered_step=self.answered_step)
            if self.swap.states is not None and swapped.state is not None:
                self.swap.states.release(swapped.state, last_step)
            request.swapped = None

    def _vacate(self, row: int, last_step: int) -> Request:
        rows, cache = self.rows, self.pool.cache
        if row in self.prefilling:
            self.prefilling.remove(row)
            cache.computes_next(row, b"")
        num_computed = rows.num_computed(row)
        is_proven = cache.partial is not None and rows.is_settled(row)
        num_shared = rows.shared.item(row)
        last_written = self._last_written(row, num_computed)
        request, blocks = rows.vacate(row)
        self.grammars.vacated(request.grammar_key)
        num_tokens = min(num_computed, len(request.tokens))
        self.publisher.publish_departing(
            row, request, blocks, num_tokens, is_proven=is_proven, last_written=last_written
        )
        window_blocks = NO_INDICES
        if self.windows is not None:
            window_blocks = self.windows.suspects(row)
            self.pool.release(self.windows.leave(row), last_step=last_step, answered_step=self.answered_step)
        self.pool.release(blocks, last_step=last_step, answered_step=self.answered_step)
        self.pending_leaves.append(row)
        if self.in_flight:
            generation = rows.generation.item(row)
            self.departed[row, generation] = Departure(
                request, self.last_step, blocks, num_shared, num_tokens, window_blocks
            )
            request.unsettled = True
        return request

    def _last_written(self, row: int, num_computed: int) -> int:
        """Return the last position whose KV sent steps may write in a row with at least `num_computed` tokens then."""
        rows = self.rows
        most = num_computed if rows.state.item(row) == PREFILL else int(rows.reach(np.array([row]))[0])
        return (most - 1) // rows.block_size

    def prefill_backlog(self) -> int:
        """Return the number of prompt tokens in its rows that are not planned yet."""
        rows = self.prefilling
        return int((self.rows.length[rows] - self.rows.computed[rows]).sum()) if rows else 0

    def num_window_blocks(self, request: Request, num_shared: int, *, longest: bool = False) -> int:
        """Return the number of window blocks that a request takes.

        Args:
            request: the request.
            num_shared: number of its blocks that are cached.
            longest: whether to count up to its longest possible sequence instead of its present tokens.
        """
        if self.windows is None:
            return 0
        num_tokens = len(request.tokens)
        if longest:
            num_tokens = max(self.limit_of(request) - 1, num_tokens)
        return self.windows.num_taken(num_shared, -(-num_tokens // self.rows.block_size))

    def num_growth(self, rows: IndexArray) -> int:
        """Return the number of blocks of all KV groups that rows take if each gets one more position."""
        if self.windows is None:
            return len(rows)
        return len(rows) + self.windows.num_growth(rows, self.rows.next_positions(rows))

    def grow(self, rows: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Take blocks for one more position of each row. Call this before the row table gets them.

        The caller has checked that `num_growth` blocks are available.

        Returns:
            The blocks of the first KV group, and those for windows, as in a plan.
        """
        blocks, num_blocks, windowed = self.pool.take(len(rows)), len(rows), NO_INDICES
        if self.windows is not None:
            positions = self.rows.next_positions(rows)
            num_new = self.windows.num_growth(rows, positions)
            windowed = self.windows.grow(rows, positions, self.pool.take(num_new))
            self.rows.grow_windows(rows[windowed[:, 0] >= 0], self.windows.num_tables)
            num_blocks += num_new
        self.capacity.grew(num_blocks)
        return blocks, windowed

    def held_blocks(self, row: int) -> IndexArray:
        """Return all blocks that the row refers to."""
        blocks = self.rows.blocks(row)
        return blocks if self.windows is None else np.concatenate((blocks, self.windows.held(row)))

    def release_passed(self, rows: list[int]) -> None:
        """Release the window blocks that these rows no longer read. The plan being made counts as sent."""
        assert self.windows is not None
        for row in rows:
            passed = self.windows.passed(row, self.rows.num_computed(row))
            self.pool.release(passed, last_step=self.last_step + 1, answered_step=self.answered_step)

    @property
    def has_work(self) -> bool:
        """Whether a request runs here, or the worker must still be notified of ended rows."""
        return bool(self.rows.num_running or self.pending_leaves)

    def requests_in_flight(self) -> list[Request]:
        """Return the live requests in steps in flight, or only the suspect if it runs alone."""
        if (suspect := self.lone_suspect()) is not None:
            return [suspect] if suspect.state is not RequestState.FINISHED else []
        attempts: set[tuple[int, int]] = set()
        for step in self.in_flight:
            attempts.update(zip(step.rows.tolist(), step.generations.tolist(), strict=True))
            attempts.update(zip(step.chunk_rows, step.chunk_generations.tolist(), strict=True))
        requests = [self._request_of(row, generation) for row, generation in sorted(attempts)]
        return [each for each in requests if each is not None and each.state is not RequestState.FINISHED]

    def _request_of(self, row: int, generation: int) -> Request | None:
        """Return the request for a row and generation, if it is still in the row or in a step in flight."""
        departure = self.departed.get((row, generation))
        if departure is not None:
            return departure.request
        return self.rows.requests[row] if self.rows.generation.item(row) == generation else None

    def lone_suspect(self) -> Request | None:
        """Return the suspect if the only step in flight contains no other request.

        The suspect is then to blame if the worker dies.
        """
        return self.in_flight[0].solo if len(self.in_flight) == 1 else None

    def step_deadline(self) -> float | None:
        """Return when the oldest step in flight is overdue, or None when nothing is in flight."""
        return (
            max(self.in_flight[0].started + self.in_flight[0].allowance, self.compiling_until)
            if self.in_flight
            else None
        )

    def decoded(self, rows: IndexArray, length: Int32Array | None = None) -> int:
        """Return the total length of a plan's decode rows, and store it.

        Args:
            rows: the decode rows.
            length: their lengths, including this plan; None if the rows are the same as in the last plan.
        """
        if length is None:
            self.decoded_context += len(rows)
        else:
            self.decoded_rows, self.decoded_context = rows, int(np.add.reduce(length))
        return self.decoded_context

    def plan_due(self, max_in_flight: int) -> float | None:
        """Return when to send the next plan: 0 for immediately, None for not before a result."""
        if len(self.in_flight) >= max_in_flight:
            return None
        return self.in_flight[-1].successor_due if self.in_flight else 0.0

    def validate(self) -> None:
        """Check rows and pool, and their consistency."""
        self.rows.validate()
        every = range(self.rows.max_rows)
        in_windows = () if self.windows is None else [self.windows.held(row) for row in every]
        self.pool.validate([self.rows.blocks(row) for row in every], in_windows)
        requests = (self.rows.requests[row] for row in self.rows.occupied())
        self.grammars.validate(Counter(r.grammar_key for r in requests if r is not None and r.grammar_key))
        assert len(self.prefilling) == len(set(self.prefilling)) == int((self.rows.state == PREFILL).sum())
        assert [entry.step for entry in self.in_flight] == list(range(self.answered_step + 1, self.last_step + 1))
        assert all(departure.last_step > self.answered_step for departure in self.departed.values())
        drafts = np.zeros_like(self.rows.drafts)
        for entry in self.in_flight:
            if entry.draft_limits is not None:
                present = self.rows.generation[entry.rows] == entry.generations
                drafts[entry.rows[present]] += entry.draft_limits[present]
        drafts[self.rows.state != DECODE] = 0
        assert drafts.tolist() == self.rows.drafts.tolist(), "drafts of rows differ from those of the steps in flight"
        assert int(self.rows.draft_limit.max(initial=0)) <= self.speculation.max_drafts
        if self.checkpoints is not None:
            self.checkpoints.validate()
