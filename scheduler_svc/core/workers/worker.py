"""The scheduler's view of one worker in one epoch: block pool, rows, steps in flight, timing.

A vacated row can be reused immediately, because a plan vacates rows before it admits requests. Steps in flight may
still sample a token for the previous request, which the row's generation identifies. `departed` holds these requests
until the last such result arrives.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, Int32Array, any_of
from scheduler_svc.core.interface.events import ModelFacts, RetainedSequence
from scheduler_svc.core.interface.plan import BlockCopy
from scheduler_svc.core.interface.records import Peer, WaitReason
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from scheduler_svc.core.memory.state_checkpoints import StateCheckpoints
from scheduler_svc.core.memory.swapping import SwappedKV, SwapSpace
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.memory.window_blocks import WindowBlocks
from scheduler_svc.core.requests.request import Request, RequestState
from scheduler_svc.core.workers.batching import BatchGate
from scheduler_svc.core.workers.capacity import Capacity
from scheduler_svc.core.workers.chunks import Pace, chunk_cost
from scheduler_svc.core.workers.cost_model import NO_STEP, CostModel, StepShape
from scheduler_svc.core.workers.grammars import Grammars
from scheduler_svc.core.workers.kinds import Kind
from scheduler_svc.core.workers.plan_timing import PlanTiming
from scheduler_svc.core.workers.quarantine import PROBATION, clear_suspect
from scheduler_svc.core.workers.rows import DECODE, PREFILL, RowTable
from scheduler_svc.core.workers.speculation import Speculation
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import KEY_BYTES, BlockKey, root_key

_MAX_LOADS = 8
"""Number of times that a request waits for blocks on disk. Memory pressure may evict them before the request starts."""
_LEAST_WAIT_S = 0.02
"""A request waits at least this long for the disk, s."""
_UNKNOWN_WAIT_S = 0.1
"""The same before the time to compute tokens is measured."""
_READ_GAIN, _LEAST_READ_SHARE = 1 / 32, 1 / 64
"""Weight of a new prefix in `Worker.read_share`, and the least share with which blocks are written to disk."""


@dataclass(slots=True)
class StepInFlight:
    """A plan that was sent and has no result yet."""

    step: int
    rows: IndexArray
    """Rows that sample in the step, ascending."""
    generations: Int32Array
    """Generations of the rows when the step was planned."""
    draft_limits: Int32Array | None
    """Maximum number of drafts for each of `rows`; None if no row verifies drafts."""
    prefilled: list[int]
    """Subset of `rows` that sample the first token of this attempt."""
    pooled: list[tuple[int, int]]
    """(row, generation) of embeddings that this step completes. Their requests have left the rows."""
    shape: StepShape
    """Work of the step, with the maximum number of drafts."""
    expected_s: float
    """Expected time, s."""
    least_s: float
    """Lower bound on its time, s. Nearly all such steps take longer."""
    started: float
    """Known start on the worker, s: when the plan was sent or the predecessor's result arrived."""
    successor_due: float
    """Time at which to send the next plan, s."""
    goes_on: bool
    """Whether there was enough work to plan the step before its predecessor's result arrived."""
    chunk_rows: list[int]
    """Rows with a chunk of their prompt in the step."""
    chunk_generations: Int32Array
    """Generations of the chunk rows when the step was planned."""
    chunk_lengths: list[int]
    """Tokens of the chunks, in the order of `chunk_rows`."""
    solo: Request | None
    """The suspect, if the step holds no other request."""
    copy_ids: list[int]
    """Block copies in the step. All are done when its result arrives."""
    allowance: float
    """Maximum time from the start of the step to its result, s."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial: a suspect runs alone."""

    request: Request
    row: int
    generation: int


@dataclass(slots=True)
class Departure:
    """A request that left a row which steps up to `last_step` may still sample."""

    request: Request
    last_step: int
    blocks: IndexArray
    """The blocks that the request held."""
    num_shared: int
    """Number of leading blocks that other requests have written."""
    num_tokens: int
    """Leading tokens whose KV is in the blocks. A token sampled later proves this KV."""
    window_blocks: IndexArray
    """The window blocks that the request has read or written."""
    failure_handled: bool = False
    """Whether the row has already failed or lost shared blocks. Later failures then have no effect."""


class Match(NamedTuple):
    """The parts of a request's KV that a worker has."""

    blocks: IndexArray
    """Cached blocks that the request can share."""
    partial: PartialMatch | None = None
    """A block whose beginning the request can copy to its next block."""
    swapped: SwappedKV | None = None
    """The whole KV in the worker's host memory. If it is present, the other fields are ignored."""
    host: IndexArray = NO_INDICES
    """Host blocks with the KV after `blocks`."""
    on_disk: IndexArray = NO_INDICES
    """Slots on disk with the KV after `host`."""
    next_key: BlockKey = b""
    """Key of the first missing full block; empty if no further block can be cached.

    With recurrent state or windows: key of the last block before the longest boundary that is being computed and can be
    used.
    """
    num_known: int = 0
    """With windows: number of cached blocks, including those after the last boundary."""
    host_tail: IndexArray = NO_INDICES
    """With windows: what is only in host memory of the tail before the end, as `[number, (position, table)]`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the device and in host memory that the request can share."""
        return len(self.blocks) + len(self.host)


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
    shares_prefixes: bool
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
    checkpoints: StateCheckpoints | None = None
    """Checkpoints of recurrent states; None if the model has no such state, or the worker no room for checkpoints."""
    windows: WindowBlocks | None = None
    """Blocks of layers with a sliding window; None if the worker has one KV group."""
    in_flight: deque[StepInFlight] = field(default_factory=deque)
    departed: dict[tuple[int, int], Departure] = field(default_factory=dict)
    read_share: float = 1.0
    """Share of the latest prefixes on disk whose tokens were read, or could have been, before they were computed."""
    prefilling: list[int] = field(default_factory=list)
    """Rows in prefill, in order of arrival."""
    pending_leaves: list[int] = field(default_factory=list)
    """Rows that the next plan names as leaves."""
    last_step: int = 0
    answered_step: int = 0
    last_tokens: int = 0
    compiling_until: float = 0.0
    pace: Pace = field(default_factory=Pace)
    trial: Trial | None = None
    suspended_trials: list[Trial] = field(default_factory=list)
    """Trials of suspect requests in this worker's rows that have no credit."""
    trial_due: bool = False
    """Whether a waiting suspect would fit. The next plan then contains it alone, once nothing is in flight."""
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
    kind: Kind = field(init=False)
    vocab_size: npt.NDArray[np.uint32] = field(init=False)
    """The model's vocabulary size as an array, because comparing with an array takes half the time."""

    def __post_init__(self) -> None:
        self.vocab_size = np.array(self.model.vocab_size, np.uint32)
        self.kind = Kind(self.max_model_len, bool(self.model.hidden_size), self.model.fingerprint)

    @property
    def has_boundaries(self) -> bool:
        """Whether requests can continue only after boundaries, and not after every cached block."""
        return self.checkpoints is not None or self.windows is not None

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

    def swapped_here(self, request: Request) -> SwappedKV | None:
        """Return the request's KV in this worker's host memory, or None."""
        return request.swapped if request.swapped is not None and request.swapped.epoch == self.epoch else None

    def release_swapped(self, request: Request, *, last_step: int) -> None:
        """Release the request's host blocks once the result of `last_step` arrives."""
        swapped = self.swapped_here(request)
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
        if self.shares_prefixes:
            # Cache all computed blocks, including those with generated tokens.
            self._publish(row, request, blocks, num_tokens)
            if is_proven:
                self._prove(request, blocks, num_tokens)
            if self.checkpoints is not None:
                self._publish_checkpoint(self.checkpoints, row, request, num_tokens)
        window_blocks = NO_INDICES
        if self.windows is not None:
            if self.shares_prefixes:
                self._attach(row, request, num_tokens // rows.block_size, last_written)
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

    def shareable_keys(self, request: Request) -> bytes:
        """Return the joined keys of the leading full blocks that the request could take from the cache.

        The last known token is always computed, because its logits are needed.
        """
        if not self.shares_prefixes or request.computes_whole_prompt:
            return b""
        return self._keys(request)[: KEY_BYTES * ((len(request.tokens) - 1) // self.rows.block_size)]

    def cached_tokens(self, request: Request) -> int:
        """Return how many of the request's tokens need no computation on this worker."""
        if request.swapped is None and self.pool.cache.partial is None and not self.has_boundaries:
            # Count the blocks without building a list, because every arrival looks up its prompt.
            keys = self.shareable_keys(request)
            num_blocks = self.pool.cache.count(keys)
            num_blocks += len(self.swap.match(keys, num_blocks))
            if self.swap.disk is not None:
                num_blocks += self._num_readable(self.swap.disk.match(keys, num_blocks), num_blocks)
            return num_blocks * self.rows.block_size
        return self.num_cached(self.match(request))

    def num_cached(self, match: Match) -> int:
        """Return how many tokens a match saves from computation."""
        if match.swapped is not None:
            return match.swapped.num_tokens
        num_partial = match.partial.num_tokens if match.partial is not None else 0
        num_blocks = match.num_blocks
        if len(match.on_disk):
            num_blocks += self._num_readable(match.on_disk, num_blocks)
        return num_blocks * self.rows.block_size + num_partial

    def _num_readable(self, on_disk: IndexArray, num_before: int) -> int:
        """Return how many blocks on disk save computation if they follow so many cached blocks."""
        num_blocks, size = len(on_disk), self.rows.block_size
        if not num_blocks:
            return 0
        cost = chunk_cost(num_blocks * size, num_before * size, self.model.break_even_context)
        return num_blocks if self.costs.may_read(num_blocks, cost) else 0

    def is_awaited(self, key: BlockKey) -> bool:
        """Return whether a request should wait for this block: a row computes it next, or it is read from disk."""
        return self.pool.cache.is_pending(key) or (self.swap.disk is not None and self.swap.disk.is_awaited(key))

    def load(self, request: Request, match: Match, now: float, num_competing: int) -> None:
        """Start to read the blocks on disk that continue a match, if this is faster than computing them.

        Tokens to compute wait for those of other requests, but a read takes no time of the device.

        Args:
            request: the request.
            match: its cached blocks.
            now: current time, s.
            num_competing: uncached prompt tokens of the waiting requests, per worker.
        """
        disk, size = self.swap.disk, self.rows.block_size
        if disk is None or not disk.is_ready or not len(match.on_disk) or request.num_loads >= _MAX_LOADS:
            return
        num_before, num_blocks = match.num_blocks, len(match.on_disk)
        cost = chunk_cost(num_blocks * size, num_before * size, self.model.break_even_context)
        cost += self.prefill_backlog() + max(0, num_competing - num_blocks * size)
        pays = self.costs.may_read(num_blocks + disk.num_reading, cost)
        self.read_share += _READ_GAIN * (pays - self.read_share)
        if not self.costs.reads(num_blocks + disk.num_reading, cost):
            return
        recompute_s = cost * self.costs.prompt_token_s if self.costs.has_chunks else _UNKNOWN_WAIT_S
        until = now + max(recompute_s, _LEAST_WAIT_S)
        num_read = self.swap.read_from_disk(match.on_disk, match.host, until)
        if num_read:
            request.num_loads += 1
            request.loaded_tokens += num_read * size

    def write_to_disk(self, now: float) -> None:
        """Start to write cached blocks to disk if reading them pays, alone or while other prompts wait."""
        disk = self.swap.disk
        if disk is None or not disk.wants_to_write(now):
            return
        if self.read_share > _LEAST_READ_SHARE or self.costs.keeps_on_disk(self.rows.block_size):
            self.swap.write_to_disk(now)

    def match(self, request: Request) -> Match:
        """Return the parts of the request's KV that this worker has."""
        return self._match(request, self.swap)

    def match_on_device(self, request: Request) -> Match:
        """Like `match`, without cached blocks in host memory.

        Searching for them is slow, and a request needs as much device memory with them as without. With windows, it may
        need a tail more, which admission checks again (`find_room`).
        """
        return self._match(request, None)

    def _match(self, request: Request, host_space: SwapSpace | None) -> Match:
        swapped = self.swapped_here(request)
        if swapped is not None:
            return Match(NO_INDICES, swapped=swapped)
        cache, keys = self.pool.cache, self.shareable_keys(request)
        blocks = cache.match(keys)
        if self.checkpoints is not None:
            return self._match_states(self.checkpoints, keys, blocks, host_space)
        if self.windows is not None:
            return self._match_windowed(self.windows, keys, blocks, host_space)
        host = NO_INDICES if host_space is None else host_space.match(keys, len(blocks))
        num_found = len(blocks) + len(host)
        next_key = keys[KEY_BYTES * num_found : KEY_BYTES * (num_found + 1)]
        if host_space is not None and host_space.disk is not None:
            on_disk = host_space.disk.match(keys, num_found)
            if len(on_disk):
                return Match(blocks, host=host, on_disk=on_disk, next_key=next_key)
        if cache.partial is None or len(host) or request.computes_whole_prompt:
            return Match(blocks, host=host, next_key=next_key)
        start = len(blocks) * self.rows.block_size
        end = min(start + self.rows.block_size, len(request.tokens) - 1)
        text = request.tokens[start:end].tobytes()
        partial = cache.match_partial(self.root_key(request), keys, len(blocks), text)
        return Match(blocks, partial, next_key=next_key)

    @staticmethod
    def _match_windowed(windows: WindowBlocks, keys: bytes, blocks: IndexArray, host_space: SwapSpace | None) -> Match:
        """Return the prefix before the last boundary whose tail is on the device or in host memory.

        Args:
            windows: the window blocks.
            keys: the joined keys that the request can share.
            blocks: the cached blocks on the device.
            host_space: the host memory to search; None to search only the device.
        """
        if host_space is None or not host_space.keys:
            num_known, reach = len(blocks), windows.reach(blocks)
            return Match(blocks[:reach], next_key=windows.awaited(keys, reach), num_known=num_known)
        host = host_space.match(keys, len(blocks))
        num_known = len(blocks) + len(host)
        reach = windows.reach_with_host(blocks, keys, num_known, host_space.keys)
        return Match(
            blocks[:reach],
            host=host[: max(0, reach - len(blocks))],
            next_key=windows.awaited(keys, reach),
            num_known=num_known,
            host_tail=windows.missing(blocks, reach),
        )

    def num_unusable_tokens(self, request: Request, num_computed: int) -> int:
        """Return how many cached tokens after the first `num_computed` a request computes again.

        With recurrent state or windows, it cannot begin after them, because no boundary follows. Tokens that it could
        use with host memory do not count: computing them was faster than copying.
        """
        if not self.has_boundaries:
            return 0
        keys, size = self.shareable_keys(request), self.rows.block_size
        if self.windows is None:
            num_known, usable = self._num_known(keys), num_computed // size
            if self.swap.states is not None:
                usable = self.swap.states.reach(keys, usable, num_known)
            return max(0, num_known * size - max(num_computed, usable * size))
        match = self._match_windowed(self.windows, keys, self.pool.cache.match(keys), self.swap)
        return max(0, match.num_known * size - max(num_computed, match.num_blocks * size))

    def _num_known(self, keys: bytes) -> int:
        """Return the number of leading blocks of the joined `keys` whose KV is on the device or in host memory."""
        num_blocks = self.pool.cache.count(keys)
        return num_blocks + len(self.swap.match(keys, num_blocks))

    def _match_states(
        self, checkpoints: StateCheckpoints, keys: bytes, blocks: IndexArray, host_space: SwapSpace | None
    ) -> Match:
        """Return the blocks of the joined `keys` up to the last state on the device, or in host memory if that pays.

        Args:
            checkpoints: the states on the device.
            keys: the joined keys that the request can share.
            blocks: the cached blocks on the device.
            host_space: space with cached blocks; None to search only for states there.
        """
        size, states = self.rows.block_size, self.swap.states
        reach, num_host = checkpoints.reach(blocks), 0
        if states is not None and states.num_cached:
            host = NO_INDICES if host_space is None else host_space.match(keys, len(blocks))
            for most in (len(blocks) + len(host), len(blocks)):
                found = states.reach(keys, reach, most)
                cost = chunk_cost((found - reach) * size, reach * size, self.model.break_even_context)
                num_host = max(0, found - len(blocks))
                if found > reach and self.costs.restores(num_host + self.swap.state_blocks, cost):
                    next_key = checkpoints.awaited(keys, found)
                    return Match(blocks[:found], host=host[:num_host], next_key=next_key)
        return Match(blocks[:reach], next_key=checkpoints.awaited(keys, reach))

    def restore_state(self, request: Request, blocks: IndexArray) -> int:
        """Return the checkpoint, or the place in host memory, with the state after a request's first cached blocks."""
        assert self.checkpoints is not None
        if self.checkpoints.reach(blocks) == len(blocks):
            return self.checkpoints.restore(int(blocks[-1]))
        assert self.swap.states is not None
        return self.swap.states.load(self.last_key(request, len(blocks)), self.last_step + 1)

    def last_key(self, request: Request, num_blocks: int) -> BlockKey:
        """Return the key of the last of a request's first `num_blocks` blocks."""
        return self._keys(request)[KEY_BYTES * (num_blocks - 1) : KEY_BYTES * num_blocks]

    def adopt(self, sequences: tuple[RetainedSequence, ...]) -> None:
        """Cache the sequences whose KV the worker has retained. No block of a new worker is in use.

        Keys depend on all tokens, so a sequence is only found by requests with the same tokens and the same scope.
        """
        # KV of a model with recurrent state or windows is of no use without a boundary.
        if self.shares_prefixes and not self.model.state_bytes and self.windows is None:
            adopted = [self._adopt(each) for each in sequences]
            if adopted:
                self.pool.adopt(np.concatenate(adopted))

    def _adopt(self, sequence: RetainedSequence) -> IndexArray:
        """Make the blocks of a sequence shareable, and return those that no other sequence has."""
        cache, block_size = self.pool.cache, self.rows.block_size
        num_tokens, blocks = len(sequence.tokens) // TOKEN_BYTES, sequence.blocks
        num_full = num_tokens // block_size
        full_tokens = sequence.tokens[: TOKEN_BYTES * block_size * num_full]
        keys = self.facts.following_keys(sequence.root, full_tokens, block_size)
        found = cache.match(keys)
        rest = blocks[len(found) :]
        # Lists and sets, because a short array takes five times as long.
        numbers = rest.tolist()
        if max(numbers, default=0) >= self.pool.num_blocks:
            return NO_INDICES
        if len(set(numbers)) < len(numbers) or any_of(cache.holds[rest]):
            return NO_INDICES
        chain = np.concatenate((found, rest))
        cache.publish(keys, chain[:num_full], b"" if cache.partial is None else full_tokens, sequence.root)
        own = chain[len(found) : num_full]
        if not sequence.is_proven or cache.partial is None:
            return own
        cache.prove(sequence.root, keys, sequence.tokens, chain)
        tail = chain[num_full:]
        return np.concatenate((own, tail[cache.holds[tail]]))

    def prefill_backlog(self) -> int:
        """Return the number of prompt tokens in its rows that are not planned yet."""
        rows = self.prefilling
        return int((self.rows.length[rows] - self.rows.computed[rows]).sum()) if rows else 0

    def publish_blocks(self, row: int, num_computed: int) -> None:
        """Publish the row's full blocks. The plan that is being made computes the row's tokens up to `num_computed`."""
        if not self.shares_prefixes:
            return
        request = self.rows.requests[row]
        assert request is not None
        self._publish(row, request, self.rows.blocks(row), num_computed)
        if self.windows is not None:
            for num_blocks in self.windows.reached(row, num_computed // self.rows.block_size):
                self._attach(row, request, num_blocks)
            self.pool.cache.computes_next(row, self.windows.next_key(row))
            return
        if self.checkpoints is not None:
            return  # Other requests wait for checkpoints, see `want_checkpoints`.
        start = KEY_BYTES * (num_computed // self.rows.block_size)
        is_complete = num_computed == len(request.tokens)
        self.pool.cache.computes_next(row, b"" if is_complete else self._keys(request)[start : start + KEY_BYTES])

    def want_checkpoints(self, row: int, num_shared: int) -> None:
        """Choose where a row in prefill saves its recurrent state, so that other requests wait for it.

        Args:
            row: the row.
            num_shared: leading full blocks that are computed already.
        """
        request = self.rows.requests[row]
        if self.checkpoints is None or request is None:
            return
        fork = self._num_known(self.shareable_keys(request))
        end = (len(request.tokens) - 1) // self.rows.block_size
        counts = sorted({count for count in (fork, end) if count > num_shared})
        self.pool.cache.computes_next(row, self.checkpoints.want(row, self._keys(request), counts))

    def boundaries(self, request: Request, match: Match) -> tuple[int, ...]:
        """Return the boundaries at which a row with the request keeps its window blocks, ascending."""
        is_swapped = match.swapped is not None
        if self.windows is None or not self.shares_prefixes or request.computes_whole_prompt or is_swapped:
            return ()
        end = (len(request.tokens) - 1) // self.rows.block_size
        return tuple(sorted({count for count in (match.num_known, end) if count > match.num_blocks}))

    def want_boundaries(self, row: int, boundaries: tuple[int, ...]) -> None:
        """Set the boundaries of a row in prefill, so that other requests wait for them."""
        request = self.rows.requests[row]
        assert request is not None
        assert self.windows is not None
        self.pool.cache.computes_next(row, self.windows.want(row, self._keys(request), list(boundaries)))

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

    @property
    def tokens_per_cached_block(self) -> int:
        """Average number of tokens that need no computation per cached block, at least 1.

        A prefix has window blocks besides its full blocks.
        """
        windows, size = self.windows, self.rows.block_size
        if windows is None:
            return size
        num_cached = int(np.count_nonzero(self.pool.cache.holds)) + len(self.swap.keys)
        num_full = num_cached - windows.num_attached - self.swap.keys.num_window_blocks
        return max(1, size * num_full // max(1, num_cached))

    def shared_blocks(self, match: Match) -> IndexArray:
        """Return the cached blocks on the device that a request with this match shares, of all KV groups."""
        blocks = match.blocks
        return blocks if self.windows is None else np.concatenate((blocks, self.windows.tail_of(blocks).ravel()))

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

    def _attach(self, row: int, request: Request, num_blocks: int, last_written: int | None = None) -> None:
        """Make the row's tail before a block boundary available, if its full blocks are in the cache."""
        blocks = self.pool.cache.match(self._keys(request)[: KEY_BYTES * num_blocks])
        if len(blocks) == num_blocks:
            self.pool.cache.attach(row, blocks, last_written=last_written)

    def save_prompt(self, row: int, num_computed: int) -> list[tuple[int, int]]:
        """Return the saves of a row whose prompt is computed up to `num_computed` by the plan being made.

        Returns:
            (number of tokens, checkpoint), ascending.
        """
        request, saves = self.rows.requests[row], []
        assert request is not None
        assert self.checkpoints is not None
        for num_blocks in self.checkpoints.reached(row, num_computed // self.rows.block_size):
            block = self.cached_block(request, num_blocks)
            if block is None:
                continue
            slot = self.checkpoints.save(row, self.rows.generation.item(row), block)
            if slot is not None:
                saves.append((num_blocks * self.rows.block_size, slot))
        self.pool.cache.computes_next(row, self.checkpoints.next_key(row))
        return saves

    def _publish_checkpoint(self, checkpoints: StateCheckpoints, row: int, request: Request, num_known: int) -> None:
        """Make the newest state of a row that leaves available, if its blocks are in the cache."""
        num_tokens = checkpoints.leave(row, num_known)
        if not num_tokens:
            return
        block = self.cached_block(request, num_tokens // self.rows.block_size)
        if block is None:
            checkpoints.discard(row)
        else:
            checkpoints.publish(row, block)

    def cached_blocks(self, request: Request) -> IndexArray:
        """Return the cached blocks on the device with the request's first tokens."""
        return self.pool.cache.match(self._keys(request))

    def cached_block(self, request: Request, num_blocks: int) -> int | None:
        """Return the last of a request's first `num_blocks` blocks in the cache; None if one of them is not cached."""
        blocks = self.pool.cache.match(self._keys(request)[: KEY_BYTES * num_blocks])
        return int(blocks[-1]) if 0 < len(blocks) == num_blocks else None

    def retain(self, request: Request, num_tokens: int, until: float, session: Hashable | None) -> None:
        """Retain the cached blocks of a request's first tokens until a time, in s, or the end of its session.

        See `Retention`.
        """
        # The recurrent state of a checkpoint cannot be retained, and blocks are of no use without it.
        if not self.shares_prefixes or self.checkpoints is not None:
            return
        blocks = self.pool.cache.match(self._keys(request)[: KEY_BYTES * (num_tokens // self.rows.block_size)])
        if self.windows is not None:
            blocks = self.shared_blocks(Match(blocks[: self.windows.reach(blocks)]))
        if len(blocks):
            tenant, priority = request.spec.tenant, request.spec.retention_priority
            self.pool.retain(blocks, tenant, priority, until, session, whole=self.windows is not None)

    def prove_prefilled(self, rows: IndexArray) -> None:
        """Mark these rows' cached blocks as proven, so that others can copy from them.

        The first tokens of these rows were sampled.
        """
        for row in rows.tolist():
            request, num_blocks = self.rows.requests[row], int(self.rows.published[row])
            assert request is not None
            self._prove(request, self.rows.blocks(row)[:num_blocks], num_blocks * self.rows.block_size)

    def prove_departed(self, departure: Departure) -> None:
        """Mark a departed request's blocks as proven: a token was sampled from its row after it left."""
        if self.pool.cache.partial is not None:
            self._prove(departure.request, departure.blocks, departure.num_tokens)

    def _publish(self, row: int, request: Request, blocks: IndexArray, num_computed: int) -> None:
        num_blocks = num_computed // self.rows.block_size
        if num_blocks > self.rows.published.item(row):
            cache = self.pool.cache
            text = b"" if cache.partial is None else request.tokens[: num_blocks * self.rows.block_size].tobytes()
            keys = self._keys(request)[: KEY_BYTES * num_blocks]
            cache.publish(keys, blocks[:num_blocks], text, self.root_key(request))
            self.rows.published[row] = num_blocks

    def _prove(self, request: Request, blocks: IndexArray, num_tokens: int) -> None:
        """Mark the blocks of a request's first tokens as proven: the logits computed from their KV were finite."""
        if self.pool.cache.partial is not None:
            text = request.tokens[:num_tokens].tobytes()
            self.pool.cache.prove(self.root_key(request), self._keys(request), text, blocks)

    def root_key(self, request: Request) -> BlockKey:
        """Return the key before the request's first block."""
        return root_key(self.model.fingerprint, request.spec.cache_scope)

    def _keys(self, request: Request) -> bytes:
        """Return the joined keys of all full blocks of the request's tokens."""
        block_size = self.rows.block_size
        keys = request.keys.get(block_size, b"")
        num_keys = len(keys) // KEY_BYTES
        if len(request.tokens) // block_size > num_keys:
            root = keys[-KEY_BYTES:] or self.root_key(request)
            keys += self.facts.following_keys(root, request.tokens[num_keys * block_size :].tobytes(), block_size)
            request.keys[block_size] = keys
        return keys

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

    def judge(self) -> None:
        """End the trial of a suspect request that has passed or left its row, and suspend one without credit.

        If no trial runs then, resume a suspended one that has credit again. A suspect with credit thus never runs with
        others.
        """
        rows = self.rows
        self._end_if_decided()
        row = -1 if self.trial is None or self.in_flight else self.trial.row
        if row >= 0 and rows.state[row] == DECODE and rows.length[row] >= rows.allowed[row]:
            self.suspend_trial()
        if self.trial is None and self.suspended_trials:
            self.suspended_trials = [trial for trial in self.suspended_trials if self._is_present(trial)]
            with_credit = (each for each in self.suspended_trials if rows.length[each.row] < rows.allowed[each.row])
            self.trial = next(with_credit, None)
            if self.trial is not None:
                self.suspended_trials.remove(self.trial)
                self._end_if_decided()

    def suspend_trial(self) -> None:
        """Suspend the trial until the suspect has credit again, because a row without credit computes nothing."""
        assert self.trial is not None
        self.suspended_trials.append(self.trial)
        self.trial = None

    def _end_if_decided(self) -> None:
        """End the trial if its request has passed or left its row."""
        trial = self.trial
        if trial is None:
            return
        if not self._is_present(trial):
            self.trial = None
        elif self.rows.num_generated(trial.row) - trial.request.faults.fatal_at >= PROBATION:
            self.end_trial()

    def _is_present(self, trial: Trial) -> bool:
        """Return whether the suspect still has its row."""
        rows, row = self.rows, trial.row
        return rows.requests[row] is trial.request and bool(rows.generation[row] == trial.generation)

    def end_trial(self) -> None:
        """Clear the suspect request, so that it runs with others again."""
        assert self.trial is not None
        clear_suspect(self.trial.request)
        self.trial = None

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
