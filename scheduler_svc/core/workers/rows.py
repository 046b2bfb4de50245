"""Row table: one worker's running requests as arrays, one per property.

The cost of a steady decode step must depend on what changes, not on the number of rows. All data read in every step is
therefore in numpy arrays indexed by row. Python objects are used only for rows that arrive, leave or need a new block.

The central array is `length`: the minimum number of tokens that a row will have when all results in flight have
arrived. A row's decode step writes the KV of its token `length - 1` and adds one token.

A step with drafts may add more: one token per accepted draft. `drafts` counts the tokens that steps in flight may add
in this way, so a row has at most `length + drafts` tokens. A draft is verified only if a block has space for it, so the
row also has at most `capacity + 1` tokens. `reach` is the smaller of these two bounds, and is compared with credit and
blocks. Without speculation, `reach` equals `length`.

Most steps only continue the decode rows. Their effect on the rows is known in advance, so it is deferred and then
applied for several steps at once (`plan_steady`, `commit_steady`, `catch_up`). The arrays that such steps change are
properties that first apply deferred steps, so code outside of this class does not see the deferral.

Invariants, for rows that are not free:
    num_prompt <= committed <= length <= limit;  0 <= drafts;  0 <= draft_limit
    PREFILL: computed < length == committed, drafts == draft_limit == 0
    DECODE: computed is not kept, it is length - 1
    capacity == number of blocks * block_size >= published * block_size and shared * block_size
"""

from collections.abc import Sequence

import numpy as np

from scheduler_svc.core.interface.arrays import (
    NO_INDICES,
    ONE,
    BoolArray,
    IndexArray,
    Int32Array,
    all_of,
    any_of,
    spread,
    where,
)
from scheduler_svc.core.requests.accounts import Account, AccountNumbers
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers.steady_rows import Outlook, SteadyRows

FREE, PREFILL, DECODE = 0, 1, 2

_LINE = 64
"""Size of a hardware cache line, bytes.

Addresses a power of two apart map to the same few cache lines, so each table row is one line longer.
"""
_RECENT = 1024 + _LINE // 4
"""Places per row for tokens that were not yet moved to the request."""
_FLUSH_EVERY = _RECENT // 2
"""Number of steps in which each row's tokens are moved once to its request, so that no step moves the tokens of all
rows.
"""
_MAX_DEFERRED = 32
"""Maximum number of results with deferred tokens. More steps would need more places per row."""
_STEPS = np.arange(_MAX_DEFERRED)
_ONE_BLOCK = np.array(1, np.intp)
_ACCEPTANCE_DECAY = np.float32(0.9)
"""Weight of earlier steps in a row's measured acceptance, per step with drafts."""
_STOPS = 4
"""Number of stop tokens per row that are compared as arrays. Requests with more stop tokens are compared one by one."""
_NO_TOKEN = -1
_INT32_MAX = np.iinfo(np.int32).max


class RowTable:
    """Table of the rows [0, max_rows)."""

    def __init__(self, max_rows: int, block_size: int, max_blocks: int) -> None:
        """Make a table for sequences of at most `max_blocks` blocks of `block_size` tokens."""
        self.max_rows = max_rows
        self.block_size = block_size
        self._block = np.array(block_size, np.int32)
        self.requests: list[Request | None] = [None] * max_rows
        # Memory pages beyond the longest sequence so far are never touched, so they use no physical memory.
        self._tables = np.zeros((max_rows, max_blocks + _LINE // 8), np.intp)
        self._num_blocks = np.zeros(max_rows, np.intp)
        self.shared = np.zeros(max_rows, np.int32)
        """Number of leading blocks written by other requests. This row's request writes the others."""
        self.published = np.zeros(max_rows, np.int32)
        """Number of leading blocks that other requests may share."""
        self.state = np.zeros(max_rows, np.int8)
        self.generation = np.zeros(max_rows, np.int32)
        self._length = np.zeros(max_rows, np.int32)
        self._committed = np.zeros(max_rows, np.int32)
        self.computed = np.zeros(max_rows, np.int32)
        self.limit = np.zeros(max_rows, np.int32)
        self.allowed = np.zeros(max_rows, np.int32)
        self._capacity = np.zeros(max_rows, np.int32)
        self.held = np.zeros(max_rows, np.bool_)
        self._hold_noted = np.zeros(max_rows, np.bool_)
        self.draft_limit = np.zeros(max_rows, np.int32)
        """Maximum number of drafts per step for each row; change it with `set_draft_limits`."""
        self.last_limit = np.zeros(max_rows, np.int32)
        """Draft limit of each row in its last planned step, if the model has recurrent state.

        After a rejected draft, the row's next step computes at most so many tokens again.
        """
        self.drafts_allowed = False
        """Whether a row may have a draft limit above 0."""
        self.drafts = np.zeros(max_rows, np.int32)
        """Maximum number of tokens that drafts in flight may add to `length`."""
        self.hits = np.zeros(max_rows, np.float32)
        """Accepted drafts of recent steps, with decay."""
        self.tries = np.zeros(max_rows, np.float32)
        """Drafts in recent steps up to and including the first rejected one in each step, with decay."""
        self.drafted = np.zeros(max_rows, np.int32)
        """Drafts verified since the request was admitted."""
        self.accepted = np.zeros(max_rows, np.int32)
        """Number of `drafted` that were accepted."""
        self.energy_j = np.zeros(max_rows)
        """Energy charged since the request was admitted, J."""
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.stream = np.zeros(max_rows, np.int32)
        self.frontend = np.zeros(max_rows, np.int32)
        self.rank = np.zeros(max_rows, np.float64)
        """Urgency; smaller is more urgent. Ties are broken by `sequence`."""
        self.sequence = np.zeros(max_rows, np.int64)
        self.preempted_at = np.zeros(max_rows, np.int32)
        """Number of generated tokens at the last preemption; -1 if never preempted."""
        self.traced: set[int] = set()
        self._accounts = AccountNumbers()
        self._account = np.zeros(max_rows, np.intp)
        self._stops = [np.full(max_rows, _NO_TOKEN, np.int32) for _ in range(_STOPS)]
        self._most_stops = 0
        """Number of the stop arrays above that are in use."""
        self._many_stops: dict[int, frozenset[int]] = {}
        self._recent = np.zeros(max_rows * _RECENT, np.int32)
        """Recent tokens, `_RECENT` places per row."""
        self._places = np.zeros(max_rows, np.intp)
        """Offset from a row's length to the place of its next token."""
        self._next_flush = 0
        """The next row to flush."""
        self._flush_due = 0
        """Progress towards the next flush, out of `_FLUSH_EVERY`; every step adds the number of rows."""
        self._free = list(range(max_rows - 1, -1, -1))
        self.num_running = 0
        """Number of occupied rows."""
        self.worst_blocks = 0
        """Blocks in the longest possible sequences of all running requests, window blocks included.

        A shared block counts once per request.
        """
        self.num_table_blocks = 0
        """Blocks in all block tables. A shared block counts once per table."""
        self._window_blocks = np.zeros(max_rows, np.intp)
        self._most_window_blocks = np.zeros(max_rows, np.intp)
        self.num_window_blocks = 0
        """Window blocks that all running requests have taken. A shared block counts once per request."""
        self.num_all_generated = 0
        """Tokens that the running requests have generated and delivered."""
        self._decoding: IndexArray | None = None
        self._num_planned = 0
        """Number of deferred plans of steady rows."""
        self._grown: list[tuple[IndexArray, IndexArray]] = []
        """(rows, blocks): a block for each row, from deferred plans."""
        self._sampled: list[Int32Array] = []
        """Tokens of the steady rows, one array per deferred result."""
        self.steady: SteadyRows | None = None
        """Columns of the decode rows, if `gather` was called for the current ones; read-only."""
        self.outlook: Outlook | None = None
        """What the next plans need, if it is known."""

    @property
    def length(self) -> Int32Array:
        """Minimum number of tokens in each row when all steps in flight have results."""
        if self._num_planned or self._sampled:
            self.catch_up()
        return self._length

    @property
    def committed(self) -> Int32Array:
        """Number of tokens in each row."""
        if self._num_planned or self._sampled:
            self.catch_up()
        return self._committed

    @property
    def capacity(self) -> Int32Array:
        """Number of tokens for which each row has blocks."""
        self.catch_up()
        return self._capacity

    @property
    def hold_noted(self) -> BoolArray:
        """Rows whose request was noted as held out, and has received neither credit nor a block since then."""
        self.catch_up()
        return self._hold_noted

    @property
    def num_free(self) -> int:
        """Number of rows that can be occupied."""
        return len(self._free)

    @property
    def decoding(self) -> IndexArray:
        """The rows in DECODE, ascending; read-only."""
        if self._decoding is None:
            self._decoding = where(self.state == DECODE)
        return self._decoding

    def _decoding_changed(self) -> None:
        self.catch_up()
        self._decoding = self.steady = self.outlook = None

    def gather(self) -> SteadyRows:
        """Gather the columns of the decode rows that stay the same while the rows only continue."""
        rows = self.decoding
        numbers = rows.astype(np.int32)
        traced = []
        for row in sorted(self.traced):
            request = self.requests[row]
            if request is not None and self.state.item(row) == DECODE:
                traced.append(request.key)
        self.steady = SteadyRows(
            rows=rows,
            column=numbers.tobytes(),
            generations=self.generation[rows],
            streams=self.stream[rows],
            stops=None if self._many_stops else [stops[rows] for stops in self._stops[: self._most_stops]],
            traced=tuple(traced),
        )
        return self.steady

    def look_ahead(self) -> Outlook | None:
        """Determine what the next plans need if the decode rows only continue; None if this cannot be foreseen."""
        rows = self.decoding
        length = self.length[rows]
        plans_left = min(int((self.allowed[rows] - length).min()), int((self.limit[rows] - length).min()) - 1)
        before = self.capacity[rows] + ONE - length
        """Number of plans before the plan in which each row needs a block."""
        if plans_left <= 0 or int(before.max()) >= self.block_size or any_of(self.held):
            return None
        ends = np.bincount(before, minlength=self.block_size).cumsum()
        self.outlook = Outlook(plans_left, rows[before.argsort(kind="stable")], [0, *ends.tolist()])
        return self.outlook

    def occupy(
        self,
        request: Request,
        *,
        limit: int,
        frontend_index: int,
        blocks: IndexArray,
        num_computed: int,
        num_shared: int,
        rank: float,
        num_window_blocks: int = 0,
        most_window_blocks: int = 0,
    ) -> int:
        """Put a request into a free row, in prefill; return the row.

        Args:
            request: the request, which is in no other row.
            limit: maximum number of tokens here, prompt included; the worker's context may be shorter than the request.
            frontend_index: number of the request's front end.
            blocks: its block table, with room for all its tokens.
            num_computed: leading tokens whose KV is in the blocks.
            num_shared: leading blocks that other requests have written.
            rank: its urgency, smaller is more urgent.
            num_window_blocks: number of its window blocks now.
            most_window_blocks: the same for its longest possible sequence.
        """
        self.catch_up()
        row = self._free.pop()
        self.num_running += 1
        num_tokens, num_blocks = len(request.tokens), len(blocks)
        self.requests[row] = request
        self._tables[row, :num_blocks] = blocks
        self._num_blocks[row] = num_blocks
        self.shared[row] = self.published[row] = num_shared
        self.state[row] = PREFILL
        self.generation[row] += 1
        self._length[row] = self._committed[row] = num_tokens
        self.computed[row] = num_computed
        self.limit[row] = limit
        self._window_blocks[row] = num_window_blocks
        self._most_window_blocks[row] = most_window_blocks
        self.num_window_blocks += num_window_blocks
        self.worst_blocks += self._worst_blocks(limit) + most_window_blocks
        self.num_table_blocks += num_blocks
        self.num_all_generated += request.num_generated
        self.set_allowed(row, request.allowed)
        self._capacity[row] = num_blocks * self.block_size
        self.num_prompt[row] = request.spec.num_prompt_tokens
        self.stream[row] = request.key.stream
        self.frontend[row] = frontend_index
        self.rank[row] = rank
        self.sequence[row] = request.sequence
        self.preempted_at[row] = request.preempted_at
        self._places[row] = row * _RECENT - num_tokens
        self._account[row] = self._accounts.enter(request.account)
        stops = request.stop_token_ids
        if len(stops) > _STOPS:
            self._many_stops[row] = frozenset(stops)
            stops = ()
        self._most_stops = max(self._most_stops, len(stops))
        for index, column in enumerate(self._stops[: self._most_stops]):
            column[row] = stops[index] if index < len(stops) else _NO_TOKEN
        if request.spec.traceparent:
            self.traced.add(row)
        return row

    def vacate(self, row: int) -> tuple[Request, IndexArray]:
        """Free a row. Return the row's request, with all committed tokens, and the row's blocks."""
        request = self.requests[row]
        assert request is not None
        self._flush(row, request)
        blocks = self.blocks(row).copy()
        self.num_all_generated -= request.num_generated
        request.drafted_tokens += self.drafted.item(row)
        request.accepted_tokens += self.accepted.item(row)
        self.draft_limit[row] = self.drafts[row] = self.drafted[row] = self.accepted[row] = 0
        self.last_limit[row] = 0
        request.energy_j += self.energy_j.item(row)
        self.energy_j[row] = 0.0
        self.hits[row] = self.tries[row] = 0.0
        self._accounts.leave(self._account.item(row))
        self._decoding_changed()
        self.requests[row] = None
        self._num_blocks[row] = 0
        self.state[row] = FREE
        self.held[row] = self.hold_noted[row] = False
        self.traced.discard(row)
        self._many_stops.pop(row, None)
        self._free.append(row)
        self.num_running -= 1
        self.num_window_blocks -= self._window_blocks.item(row)
        self.worst_blocks -= self._worst_blocks(self.limit.item(row)) + self._most_window_blocks.item(row)
        self._window_blocks[row] = self._most_window_blocks[row] = 0
        self.num_table_blocks -= len(blocks)
        return request, blocks

    def set_allowed(self, row: int, allowed: int) -> None:
        """Set the maximum number of tokens, prompt included, that the reader's credit allows."""
        if allowed < self.allowed.item(row):
            self.outlook = None
        self.allowed[row] = min(allowed, _INT32_MAX)
        self._hold_noted[row] = False

    def start_decoding(self, row: int) -> None:
        """Start decoding a row whose whole prompt is planned; its first token is in flight."""
        self.state[row] = DECODE
        self.length[row] += 1
        self._decoding_changed()

    def set_draft_limits(self, rows: IndexArray, limits: Int32Array) -> None:
        """Set the draft limits of decode rows."""
        self.draft_limit[rows] = limits
        self.drafts_allowed = bool(self.draft_limit.any())

    def blocks(self, row: int) -> IndexArray:
        """Return the row's block table as a read-only view."""
        self.catch_up()
        return self._tables[row, : self._num_blocks[row]]

    def next_positions(self, rows: IndexArray) -> IndexArray:
        """Return the position of the next block of each row, which has no deferred block."""
        return self._num_blocks[rows]

    def grow_windows(self, rows: IndexArray, num_blocks: int) -> None:
        """Count window blocks that the rows have taken, as many for each; the rows are distinct."""
        self._window_blocks[rows] += num_blocks
        self.num_window_blocks += len(rows) * num_blocks

    def grow(self, rows: IndexArray, blocks: IndexArray) -> None:
        """Append one block to each row's table; the rows are distinct."""
        self.catch_up()
        self.num_table_blocks += len(rows)
        self._append_blocks(rows, blocks)

    def _append_blocks(self, rows: IndexArray, blocks: IndexArray) -> None:
        num_blocks = self._num_blocks[rows]
        self._tables[rows, num_blocks] = blocks
        self._num_blocks[rows] = num_blocks + _ONE_BLOCK
        self._capacity[rows] += self._block
        self._hold_noted[rows] = False

    def plan_steady(self, needy: IndexArray, blocks: IndexArray) -> None:
        """Plan a step of the steady rows: one more token for each row, and one more block for each row in `needy`."""
        if len(needy):
            self._grown.append((needy, blocks))
            self.num_table_blocks += len(needy)
        self._num_planned += 1
        # Each row needs at most one block in so many plans.
        if self._num_planned == self.block_size:
            self.catch_up()

    def commit_steady(self, tokens: Int32Array) -> Int32Array:
        """Like `commit` for one token of each steady row."""
        steady = self.steady
        assert steady is not None
        self.num_all_generated += len(tokens)
        first_indices = steady.indices
        if first_indices is None:
            first_indices = self.committed[steady.rows] - self.num_prompt[steady.rows]
        steady.indices = first_indices + ONE
        self._sampled.append(tokens)
        if len(self._sampled) == _MAX_DEFERRED:
            self.catch_up()
        return first_indices

    def catch_up(self) -> None:
        """Apply the deferred steps of the steady rows."""
        if not self._num_planned and not self._sampled:
            return
        rows = self.decoding
        if self._num_planned:
            self._length[rows] += np.int32(self._num_planned)
            self._num_planned = 0
            if self._grown:
                grown, self._grown = self._grown, []
                self._append_blocks(*(np.concatenate(column) for column in zip(*grown, strict=True)))
        if self._sampled:
            sampled, self._sampled = self._sampled, []
            num_steps = len(sampled)
            committed = self._committed[rows]
            places = (self._places[rows] + committed)[:, None] + _STEPS[:num_steps]
            self._recent[places] = np.stack(sampled, axis=1)
            self._committed[rows] = committed + np.int32(num_steps)
            self._count_flushes(num_steps)

    def reach(self, rows: IndexArray) -> Int32Array:
        """Return the maximum number of tokens in each row when all steps in flight have results."""
        reach: Int32Array = np.minimum(self.length[rows] + self.drafts[rows], self.capacity[rows] + ONE)
        return reach

    def commit(self, rows: IndexArray, tokens: Int32Array, counts: Int32Array | None = None) -> Int32Array:
        """Append tokens to each row; the rows are distinct.

        Args:
            rows: the rows, `[n]`.
            tokens: tokens, grouped by row in the order of `rows`.
            counts: number of tokens per row, `[n]`; None if each row has one.

        Returns:
            index of each row's first token among its generated tokens, `[n]`.
        """
        self.catch_up()
        if self.steady is not None:
            self.steady.indices = None
        length = self._committed[rows]
        self.num_all_generated += len(tokens)
        if counts is None:
            self._recent[self._places[rows] + length] = tokens
            self._committed[rows] = length + ONE
            self._count_flushes(1)
        else:
            self._recent[np.repeat(self._places[rows], counts) + spread(length, counts)] = tokens
            self._committed[rows] = length + counts
            self._count_flushes(int(counts.max(initial=1)))
        first_indices: Int32Array = length - self.num_prompt[rows]
        return first_indices

    def _count_flushes(self, num_steps: int) -> None:
        """Move the tokens of the rows that are due after this many steps."""
        self._flush_due += self.max_rows * num_steps
        while self._flush_due >= _FLUSH_EVERY:
            self._flush_due -= _FLUSH_EVERY
            row = self._next_flush
            self._next_flush = (row + 1) % self.max_rows
            request = self.requests[row]
            if request is not None:
                self._flush(row, request)

    def verified(self, rows: IndexArray, drafted: Int32Array, accepted: Int32Array) -> None:
        """Record how many drafts each row verified and accepted in a step; the rows are distinct."""
        self.drafted[rows] += drafted
        self.accepted[rows] += accepted
        tried = where(drafted > 0)
        if len(tried):
            rows, drafted, accepted = rows[tried], drafted[tried], accepted[tried]
            # Drafts after the first rejected one carry no information.
            self.tries[rows] = _ACCEPTANCE_DECAY * self.tries[rows] + np.minimum(accepted + ONE, drafted)
            self.hits[rows] = _ACCEPTANCE_DECAY * self.hits[rows] + accepted

    def stopped(self, rows: IndexArray, tokens: Int32Array, gathered: Sequence[Int32Array] | None = None) -> IndexArray:
        """Return the positions within `rows` at which the token ends the row's request.

        Args:
            rows: the rows, `[n]`.
            tokens: one token for each row, `[n]`.
            gathered: stop tokens of `rows`, if they were gathered.
        """
        # Compare one array at a time, because comparing a matrix with a column is many times slower.
        hits: BoolArray | None = None
        if gathered is None:
            gathered = [stops[rows] for stops in self._stops[: self._most_stops]]
        for stops in gathered:
            matches = stops == tokens
            if any_of(matches):
                hits = matches if hits is None else hits | matches
        if self._many_stops:
            hits = np.zeros(len(rows), np.bool_) if hits is None else hits
            for position, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                hits[position] |= token in self._many_stops.get(row, ())
        return NO_INDICES if hits is None else where(hits)

    def occupied(self) -> list[int]:
        """Return the rows that are not free."""
        positions: list[int] = where(self.state != FREE).tolist()
        return positions

    def charge(self, rows: IndexArray, counts: Int32Array | None) -> list[tuple[Account, int]]:
        """Return the tokens per account for rows that received this many tokens each; None if each received one."""
        owed = np.bincount(self._account[rows], weights=counts)
        return [(self._accounts[number], int(owed[number])) for number in np.flatnonzero(owed).tolist()]

    def num_computed(self, row: int) -> int:
        """Return the number of tokens in the row whose KV is written once the sent steps are done."""
        return self.computed.item(row) if self.state.item(row) == PREFILL else self.length.item(row) - 1

    def is_settled(self, row: int) -> bool:
        """Return whether the row is in DECODE and all tokens sampled in sent steps have arrived."""
        return bool(self.state[row] == DECODE and self.length[row] == self.committed[row])

    def num_generated(self, row: int) -> int:
        """Return the number of tokens that the row's request has generated and delivered."""
        return self.committed.item(row) - self.num_prompt.item(row)

    def validate(self) -> None:
        """Check the invariants in the module's docstring."""
        for row in range(self.max_rows):
            request = self.requests[row]
            assert (self.state[row] == FREE) == (request is None)
            if request is None:
                assert not len(self.blocks(row))
                continue
            assert self.num_prompt[row] <= self.committed[row] <= self.length[row] <= self.limit[row]
            assert self.capacity[row] == len(self.blocks(row)) * self.block_size
            assert 0 <= self.shared[row] <= len(self.blocks(row))
            num_recent = self._places[row] + self.committed[row] - row * _RECENT
            assert 0 <= num_recent == self.committed[row] - len(request.tokens) <= _RECENT
            assert self.drafts[row] >= 0
            assert self.draft_limit[row] >= 0
            assert self.drafts_allowed or not self.draft_limit[row]
            if self.state[row] == PREFILL:
                assert self.computed[row] < self.length[row] == self.committed[row]
                assert not self.drafts[row]
                assert not self.draft_limit[row]
            else:
                assert self.capacity[row] >= self.length[row] - 1
        assert self.decoding.tolist() == where(self.state == DECODE).tolist()
        if self.steady is not None:
            assert self.steady.rows is self.decoding
            assert self.steady.column == self.decoding.astype(np.int32).tobytes()
            assert self.steady.generations.tolist() == self.generation[self.decoding].tolist()
        assert sorted(self._free) == where(self.state == FREE).tolist()
        assert self.num_running == self.max_rows - len(self._free)
        assert self.num_table_blocks == self._num_blocks.sum()
        assert self.num_all_generated == sum(map(self.num_generated, self.occupied()))
        assert self.num_window_blocks == self._window_blocks.sum()
        assert all_of(self._window_blocks <= self._most_window_blocks)
        worst_blocks = sum(self._worst_blocks(int(self.limit[row])) for row in self.occupied())
        assert self.worst_blocks == worst_blocks + self._most_window_blocks.sum()

    def _worst_blocks(self, limit: int) -> int:
        """Return the blocks for a sequence of `limit` tokens. The last token is never computed and needs no slot."""
        return -(-(limit - 1) // self.block_size)

    def _flush(self, row: int, request: Request) -> None:
        length, place = self.committed.item(row), self._places.item(row)
        first = row * _RECENT
        if first - place < length:
            request.tokens.frombytes(self._recent[first : place + length].tobytes())
            self._places[row] = first - length
