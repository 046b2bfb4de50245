"""Row table: the state of every sequence on the worker, as arrays indexed by row.

A plan lists changes. `leave` and `change` check them against the rows' state, and apply them in the protocol's order:
leaves, admissions, appends, holds and releases. The host knows this state without waiting for the device, because the
plan fixes the number of tokens by which a row advances. Only each row's last sampled token is kept on the device, so
that step N + 1 can start from step N without the host. A row with drafts is the exception: the host must know how many
drafts were accepted before it builds the next batch.

A row is free, in prefill until all its admitted tokens are computed, and then in decode, or done if it pools. A row in
prefill is computed in the steps that have a chunk for it. A row in decode is computed in every step, unless it is held
or has failed.
"""

import enum
from array import array

import numpy as np
import numpy.typing as npt
import torch

from worker_svc.device.state import DeviceState
from worker_svc.device.upload import upload
from worker_svc.interface.arrays import NO_ROWS, Int32Array, IntArray
from worker_svc.interface.errors import PlanError
from worker_svc.interface.limits import Limits
from worker_svc.interface.plan import Admission, Plan
from worker_svc.interface.result import FailureKind, RowFailure
from worker_svc.outputs.grammars import GrammarRows, GrammarStore
from worker_svc.outputs.logits import LogitsRules
from worker_svc.outputs.pooling import PoolingRows
from worker_svc.outputs.sampling_columns import SamplingColumns
from worker_svc.rows.block_tables import BlockTables
from worker_svc.rows.history import TokenHistory
from worker_svc.rows.retained import KnownTokens, Retained

_NO_FLAGS = np.zeros(0, np.bool_)
_MOST_UNTAKEN = 64
"""Steps whose tokens are added to the history at once; it is needed only while rows may have drafts."""


class RowState(enum.IntEnum):
    """State of a row."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


class RowTable:
    """State of all rows of one worker."""

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        state: DeviceState | None = None,
        grammars: GrammarStore | None = None,
        *,
        follows: bool = False,
    ) -> None:
        """Create a table of free rows.

        Args:
            limits: the worker's limits.
            device: the device of the last tokens and the block tables.
            state: holds the device's copy of the block tables; None on a CPU.
            grammars: the compiled grammars; None if rows with a grammar can sample no token.
            follows: whether another rank applies the rules and grammars, so that they are not needed here.
        """
        self._follows = follows
        rows = limits.max_rows
        self._state_on_device = state
        self._limits = limits
        self._state = np.zeros(rows, np.int8)
        self._generation = np.zeros(rows, np.int64)
        self._held = np.zeros(rows, np.bool_)
        self._failed = np.zeros(rows, np.bool_)
        self._any_failed = False  # While this is False, no row of this epoch needs a check.
        self._num_tokens = np.zeros(rows, np.int64)
        self._num_computed = np.zeros(rows, np.int64)
        self._num_prompt = np.zeros(rows, np.int64)
        self._draft_limit = np.zeros(rows, np.int64)
        self._window_first = np.zeros(rows, np.int64)
        self._window_period = np.zeros(rows, np.int64)
        self._speculates = False
        self._prompts: dict[int, Int32Array] = {}
        self._request_ids = [""] * rows
        self._prefix_roots = [b""] * rows
        self._known = None if follows or limits.state_bytes or limits.num_kv_groups > 1 else KnownTokens()
        self._membership = 0
        self._decode_rows: tuple[int, IntArray] = (-1, np.zeros(0, np.int64))
        self.tables = BlockTables(limits.num_kv_groups, rows, limits.max_blocks_per_row, state)
        self.sampling = SamplingColumns(rows)
        self.needs_all_logits = np.zeros(rows, np.bool_)
        """`[max_rows]`: see `Admission.needs_all_logits`."""
        self.rules = LogitsRules(limits.vocab_size, device)
        self.grammars = GrammarRows(grammars, limits.vocab_size, rows, device)
        self.pooling = PoolingRows(rows)
        self._history = TokenHistory() if limits.max_draft_tokens else None
        self._untaken: list[tuple[IntArray, IntArray, Int32Array]] = []
        """Rows, generations and tokens of the last steps, if they are not in the history yet."""
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """`[max_rows + 1] int64` on the device: the last sampled token of each row; the last element is padding."""
        self.last_known = self.last_token.numpy() if device.type == "cpu" else np.zeros(rows + 1, np.int64)
        """`[max_rows + 1]`: the last sampled token of each row that the host knows, on a worker that speculates."""

    @property
    def limits(self) -> Limits:
        """The worker's limits."""
        return self._limits

    @staticmethod
    def state_words(limits: Limits) -> int:
        """Return the number of `DeviceState` words that the block tables need."""
        return limits.num_kv_groups * limits.max_rows * limits.max_blocks_per_row

    @property
    def membership(self) -> int:
        """Version number that changes when the set of decode rows or a row's sampling parameters may have changed."""
        return self._membership

    @property
    def generation(self) -> IntArray:
        """`[max_rows]`: generation of each row, which the scheduler increases with each use of it in an epoch."""
        return self._generation

    @property
    def num_computed(self) -> IntArray:
        """`[max_rows]`: tokens of each row whose KV is computed."""
        return self._num_computed

    @property
    def num_prompt(self) -> IntArray:
        """`[max_rows]`: prompt tokens of each row."""
        return self._num_prompt

    @property
    def speculates(self) -> bool:
        """Whether a row has a draft limit above 0."""
        return self._speculates

    def draft_room(self, rows: IntArray) -> tuple[IntArray, IntArray]:
        """Return the decode rows among `rows` that may have drafts in the next step, and the most drafts of each."""
        ends = self._num_computed[rows] + 1
        most = np.minimum(self._draft_limit[rows], self._limits.max_model_len - ends - 1)
        most = np.minimum(most, self.tables.lengths[rows] * self._limits.block_size - ends)
        may = most > 0
        return rows[may], most[may]

    def take_tokens(self, rows: IntArray, generations: IntArray, tokens: Int32Array) -> None:
        """Take the sampled tokens of a step, in order, on a worker that speculates; negative codes are left out.

        They are noted together with those of later steps, when somebody asks for them. The arrays must not change.
        """
        self._untaken.append((rows, generations, tokens))
        if len(self._untaken) >= _MOST_UNTAKEN:
            self._note_taken()

    def note_last(self, rows: IntArray, tokens: Int32Array) -> None:
        """Note the last sampled token of each row on the host, after a step without drafts."""
        if self.last_token.device.type != "cpu":
            self.last_known[rows] = tokens

    def accept(self, rows: IntArray, counts: IntArray, tokens: Int32Array) -> None:
        """Advance rows in use after a step with drafts: row `rows[i]` got `counts[i]` tokens, the last is `tokens[i]`.

        The other `counts[i] - 1` tokens are accepted drafts. Their KV is already computed.
        """
        self._num_computed[rows] += counts - 1
        self.last_known[rows] = tokens
        if self.last_token.device.type != "cpu":
            device = self.last_token.device
            self.last_token.index_copy_(0, upload(rows, device), upload(tokens.astype(np.int64), device))

    def known_tokens(self, row: int) -> "array[int]":
        """Return all tokens of a row that the host knows, on a worker that speculates; do not change them."""
        if self._history is None:
            raise RuntimeError("token history: this worker does not speculate")
        self._note_taken()
        return self._history.tokens(row)

    def needs_host_tokens(self, row: int) -> bool:
        """Return whether the host must know the row's last token before the next one is sampled."""
        return row in self.grammars or self.rules.needs_host_tokens(row)

    def restricted(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each row whether it has rules or a grammar."""
        if not len(self.rules) and not len(self.grammars):
            return np.zeros(len(rows), np.bool_)
        return np.array([row in self.rules or row in self.grammars for row in rows.tolist()], np.bool_)

    def note_token(self, row: int, token: int) -> None:
        """Note the last token of a row, for rules and grammars that need it on the host."""
        self.rules.note_token(row, token)
        self.grammars.note_token(row, token)

    def request_id(self, row: int) -> str:
        """Return the ID of the request that uses a row, or used it last."""
        return self._request_ids[row]

    @property
    def any_failed(self) -> bool:
        """Whether a row has failed in this epoch."""
        return self._any_failed

    def decode_rows(self) -> IntArray:
        """Return the rows that are computed in every step, ascending. The array is read-only."""
        if self._decode_rows[0] != self._membership:
            active = (self._state == RowState.DECODE) & ~self._held & ~self._failed
            self._decode_rows = (self._membership, np.flatnonzero(active))
        return self._decode_rows[1]

    def leave(self, plan: Plan) -> IntArray:
        """Apply the plan's leaves, the first of its changes, and return their rows.

        Raises:
            PlanError: a row is not in use.
        """
        rows = plan.leaves
        if len(rows):
            self._check_used(rows, "leave")
            self._remove(rows)
        return rows

    def change(self, plan: Plan) -> None:
        """Apply the plan's other changes, which come after its leaves.

        Raises:
            PlanError: a change does not fit the state of its row.
        """
        for admission in plan.admissions:
            self._admit(admission)
        if len(plan.append_rows):
            self._append(plan)
        if len(plan.holds):
            self._set_held(plan.holds, held=True)
        if len(plan.releases):
            self._set_held(plan.releases, held=False)
        if len(plan.draft_rows):
            self._check_used(plan.draft_rows, "draft limit")
            self._set_draft_limits(plan.draft_rows, plan.draft_limits)

    def check_chunks(self, rows: IntArray, lengths: IntArray) -> None:
        """Check a plan's prefill chunks. Call after `change`.

        Raises:
            PlanError: a row is not in prefill, or a chunk exceeds the row's tokens.
        """
        self._check_used(rows, "chunk")
        if (self._state[rows] != RowState.PREFILL).any():
            raise PlanError("chunk: a row is not in prefill")
        if (lengths > self._num_tokens[rows] - self._num_computed[rows]).any():
            raise PlanError("chunk: its length exceeds the remaining tokens of its row")
        if self._limits.window_chunk and (lengths > self._limits.window_chunk).any():
            raise PlanError(f"chunk: it exceeds {self._limits.window_chunk} tokens, for which windows have room")

    def chunk_tokens(self, row: int, length: int) -> Int32Array:
        """Return the next `length` tokens of a row in prefill."""
        start = int(self._num_computed[row])
        return self._prompts[row][start : start + length]

    def check_room(self, rows: IntArray, ends: IntArray) -> None:
        """Check that each row has blocks for its tokens up to position `ends` (exclusive); `rows` is not empty.

        Raises:
            PlanError: a row lacks blocks, or exceeds `max_model_len`.
        """
        if int(ends.max()) > self._limits.max_model_len:
            raise PlanError(f"step: a row exceeds max_model_len {self._limits.max_model_len}")
        if (self.tables.lengths[rows] * self._limits.block_size < ends).any():
            raise PlanError("step: a row has no block for its next token")

    def advance(self, chunk_rows: IntArray, chunk_lengths: IntArray) -> npt.NDArray[np.bool_]:
        """Count a step's tokens as computed: one per decode row, a chunk per row in `chunk_rows`.

        Returns:
            A boolean array: which of `chunk_rows` have finished prefill. Those rows are now in decode, or done.
        """
        self._num_computed[self.decode_rows()] += 1
        if len(chunk_rows) == 0:
            return _NO_FLAGS
        self._num_computed[chunk_rows] += chunk_lengths
        finished: npt.NDArray[np.bool_] = self._num_computed[chunk_rows] == self._num_tokens[chunk_rows]
        if finished.any():
            done = chunk_rows[finished]
            self._state[done] = np.where(self.pooling.pools(done), RowState.DONE, RowState.DECODE)
            for row in done.tolist():
                del self._prompts[row]
            self._membership += 1
        return finished

    def explain_no_token(self, row: int) -> RowFailure:
        """Return why the row's constraints allow no token, and which field of its request to change."""
        generation = int(self._generation[row])
        failure = self.grammars.explain(row, generation)
        if failure is not None:
            return failure
        fields = ["grammar"] if row in self.grammars else []
        fields += self.rules.forbidding(row, int(self._num_computed[row] - self._num_prompt[row]))
        others = " and ".join(map(_in_words, fields[1:]))
        beside = f" together with {others}" if others else ""
        remedy = "relax one of them" if beside else "relax it"
        return RowFailure(
            row=row,
            generation=generation,
            kind=FailureKind.NO_TOKEN_ALLOWED,
            reason=f"allows no token at this point of the output{beside}; {remedy}",
            field=fields[0] if fields else "sampling",
        )

    def fail(self, rows: IntArray, generations: IntArray) -> None:
        """Exclude rows from all further steps until they leave; ignores rows that another request uses by now."""
        self._failed[rows[self.uses(rows, generations)]] = True
        self._any_failed = True
        self._membership += 1

    def uses(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each row whether it is in use and still has the given generation."""
        in_use: npt.NDArray[np.bool_] = (self._state[rows] != RowState.FREE) & (self._generation[rows] == generations)
        return in_use

    def has_failed(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """Return for each row whether it has failed and still has the given generation."""
        if not self._any_failed:
            return np.zeros(len(rows), np.bool_)
        failed: npt.NDArray[np.bool_] = self._failed[rows] & (self._generation[rows] == generations)
        return failed

    def failed_before_leaving(self, row: int) -> bool:
        """Return whether a row that leaves with the present plan has failed."""
        return bool(self._failed[row])

    def failed_rows(self) -> IntArray:
        """Return the rows that would be in `decode_rows` if they had not failed, ascending."""
        if not self._any_failed:
            return NO_ROWS
        return np.flatnonzero(self._failed & (self._state == RowState.DECODE) & ~self._held)

    def sampled(self, rows: IntArray, generations: IntArray, tokens: Int32Array) -> None:
        """Note the tokens of a step's result, for `retained`."""
        if self._known is not None:
            self._known.sampled(rows, generations, tokens)

    def retained(self) -> tuple[Retained, ...]:
        """Return the sequences whose KV stays in the blocks when the rows are dropped; the device must be idle.

        After a failed row in this epoch there are none, because rows may share its KV.
        """
        if self._known is None or self._any_failed:
            return ()
        found = []
        for row in np.flatnonzero((self._state == RowState.PREFILL) | (self._state == RowState.DECODE)).tolist():
            if not self._prefix_roots[row]:
                continue
            tokens = self._known.tokens(row)
            # Each sampled token proves the KV of all tokens before it.
            is_proven = len(tokens) > int(self._num_tokens[row])
            length = len(tokens) - 1 if self._state[row] == RowState.DECODE else int(self._num_computed[row])
            blocks = self.tables.blocks(row)[0, : -(-length // self._limits.block_size)]
            if length:
                found.append(Retained(self._prefix_roots[row], tokens[:length], blocks, is_proven))
        return tuple(found)

    def clear(self) -> IntArray:
        """Drop all rows, for a new epoch, and return the rows that were in use."""
        rows = np.flatnonzero(self._state != RowState.FREE)
        self._remove(rows)
        self._generation.fill(0)
        self._untaken.clear()
        if self._known is not None:
            self._known.clear()
        self._any_failed = False
        self.tables.clear()
        if self._state_on_device is not None:
            self._state_on_device.forget()
        return rows

    def publish(self) -> None:
        """Send all changes of the device's state, such as its block tables, to the device."""
        if self._state_on_device is not None:
            self._state_on_device.publish()

    def _note_taken(self) -> None:
        """Add the tokens of `take_tokens` to the history of the rows that still have the same request."""
        if not self._untaken or self._history is None:
            return
        rows, generations, tokens = (
            self._untaken[0]
            if len(self._untaken) == 1
            else (np.concatenate(columns) for columns in zip(*self._untaken, strict=True))
        )
        num_steps = len(self._untaken)
        self._untaken.clear()
        current = (tokens >= 0) & self.uses(rows, generations)
        rows, tokens = rows[current], tokens[current]
        if num_steps > 1:
            order = np.argsort(rows, kind="stable")
            rows, tokens = rows[order], tokens[order]
        self._history.extend(rows, tokens)

    def _check_used(self, rows: IntArray, what: str) -> None:
        if (self._state[rows] == RowState.FREE).any():
            raise PlanError(f"{what}: a row is not in use")

    def _set_draft_limits(self, rows: IntArray, limits: IntArray | int) -> None:
        self._draft_limit[rows] = limits
        self._speculates = bool(self._draft_limit.any())

    def _remove(self, rows: IntArray) -> None:
        self._state[rows] = RowState.FREE
        if self._speculates:
            self._set_draft_limits(rows, 0)
        for row in rows.tolist():
            self._prompts.pop(row, None)
            if self._known is not None:
                self._known.leave(row)
            self.rules.leave(row)
            self.grammars.leave(row)
            self.pooling.leave(row)
            if self._history is not None:
                self._history.leave(row)
        self._membership += 1

    def _admit(self, admission: Admission) -> None:
        row, tokens = admission.row, admission.token_ids
        if self._state[row] != RowState.FREE:
            raise PlanError(f"admission: row {row} is occupied")
        if admission.generation <= self._generation[row]:
            raise PlanError(
                f"admission: generation {admission.generation} of row {row} is not newer than the previous generation"
            )
        self._state[row] = RowState.PREFILL
        self._generation[row] = admission.generation
        self._held[row] = self._failed[row] = False
        self._num_tokens[row] = len(tokens)
        self._num_computed[row] = admission.num_computed_tokens
        self._num_prompt[row] = admission.num_prompt_tokens
        self._prompts[row] = tokens
        self._request_ids[row] = admission.request_id
        self._prefix_roots[row] = admission.prefix_root
        if self._known is not None:
            self._known.admit(row, admission.generation, tokens)
        if self._history is not None:
            self._history.admit(row, tokens)
        blocks = admission.block_tables[0][None]
        if len(admission.block_tables) > 1:
            blocks = np.concatenate((blocks, _window_tables(admission)))
        self.tables.replace(row, blocks)
        self._window_first[row], self._window_period[row] = admission.window_first, admission.window_period
        self.pooling.admit(row, admission.pooling)
        self.sampling.set(row, admission.sampling)
        self.needs_all_logits[row] = admission.needs_all_logits
        self._membership += 1
        if self._follows:
            return
        self.rules.admit(row, admission.sampling, tokens, admission.num_prompt_tokens)
        if admission.sampling_fault:
            self.grammars.refuse(row, admission.sampling_fault)
        else:
            output = tokens[admission.num_prompt_tokens :]
            self.grammars.admit(row, admission.grammar, admission.sampling.stop_token_ids, output)

    def _append(self, plan: Plan) -> None:
        rows = plan.append_rows
        self._check_used(rows, "append")
        blocks = plan.append_blocks[None]
        if self._limits.num_kv_groups > 1:
            blocks = np.concatenate((blocks, self._window_blocks(rows, plan.append_windows)))
        self.tables.append(rows, blocks)

    def _window_blocks(self, rows: IntArray, blocks: Int32Array) -> Int32Array:
        """Return the blocks `[tables, n]` of each row's next position in its tables for windows.

        Args:
            rows: `[n]`.
            blocks: see `Plan.append_windows`.

        Raises:
            PlanError: a position has no block, or a row has too many.
        """
        positions = self.tables.next_positions(rows)
        self.tables.check_room(int(positions.max()) + 1)
        before = positions - self._window_period[rows]
        is_new = blocks[:, 0] >= 0 if len(blocks) else np.zeros(len(rows), np.bool_)
        if (~is_new & ((before < self._window_first[rows]) | (before >= self.tables.lengths[rows]))).any():
            raise PlanError("append: a position of a window has no block, and there is none a period before")
        added = self.tables.window_blocks_at(rows, np.maximum(before, 0)).astype(np.int32)
        return np.where(is_new, blocks.T, added) if len(blocks) else added

    def _set_held(self, rows: IntArray, *, held: bool) -> None:
        what = "hold" if held else "release"
        self._check_used(rows, what)
        if (self._state[rows] != RowState.DECODE).any() or (self._held[rows] == held).any():
            raise PlanError(f"{what}: a row is not in decode, or is already {'held' if held else 'released'}")
        self._held[rows] = held
        self._membership += 1


def _in_words(field: str) -> str:
    """Return the name of a field without its message, because HTTP requests have no such messages."""
    # The scheduler sends one-token bad words as banned tokens.
    return "banned_token_ids or bad_words" if field == "sampling.banned_token_ids" else field.rpartition(".")[2]


def _window_tables(admission: Admission) -> Int32Array:
    """Return a row's tables for windows `[tables, positions]`, from position 0 to the end of the first group's."""
    blocks = np.stack(admission.block_tables[1:])
    positions = np.arange(len(admission.block_tables[0])) - admission.window_first
    length, period = blocks.shape[1], admission.window_period
    repeated = length - period + (positions - length) % period
    tables: Int32Array = blocks[:, np.where(positions < length, np.maximum(positions, 0), repeated)]
    return tables
