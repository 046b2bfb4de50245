"""The table of rows: what the worker knows of each sequence, as arrays indexed by row.

A plan carries differences; `leave` and `change` make them in the protocol's order (leaves, admissions, appends, holds
and releases) and check each against the contract. Everything here is known on the host without waiting for a device:
a row that takes part in a step advances by a number that the plan fixes, whatever token it samples. The one thing that
lives on the device only is the last sampled token of each row, so that step N feeds step N + 1 without the host.

A row is free, in prefill until all its admitted tokens are computed, then in decode, or done if it pools. It takes part
in a step when the plan gives it a chunk (prefill), or in every step (decode) unless it is held or has failed.
"""

import enum

import numpy as np
import numpy.typing as npt
import torch

from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array, MalformedColumnError, from_column, from_columns
from worker_svc.block_tables import BlockTables, IntArray
from worker_svc.device_state import DeviceState
from worker_svc.errors import PlanError
from worker_svc.grammars import GrammarRows, GrammarStore
from worker_svc.limits import Limits
from worker_svc.logits import LogitsRules
from worker_svc.pooling import PoolingRows
from worker_svc.sampling_columns import SamplingColumns

_NO_ROWS = np.zeros(0, np.int64)
_NO_FLAGS = np.zeros(0, np.bool_)


class RowState(enum.IntEnum):
    """Where a row is in its life."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    DONE = 3


class RowTable:
    """All rows of one worker."""

    def __init__(
        self,
        limits: Limits,
        device: torch.device,
        state: DeviceState | None = None,
        grammars: GrammarStore | None = None,
    ) -> None:
        """
        Args:
            limits: what there is of everything.
            device: where last tokens and block tables are.
            state: what the device's copy of the block tables is part of; None on a CPU.
            grammars: compiled grammars; without them a row with a grammar may sample nothing.
        """
        rows = limits.max_rows
        self._state_on_device = state
        self._limits = limits
        self._state = np.zeros(rows, np.int8)
        self._generation = np.zeros(rows, np.int64)
        self._held = np.zeros(rows, np.bool_)
        self._failed = np.zeros(rows, np.bool_)
        self._any_failed = False  # within this epoch; almost always spares a look at every row
        self._num_tokens = np.zeros(rows, np.int64)
        self._num_computed = np.zeros(rows, np.int64)
        self._num_prompt = np.zeros(rows, np.int64)
        self._prompts: dict[int, Int32Array] = {}
        self._request_ids = [""] * rows
        self._membership = 0
        self._decode_rows: tuple[int, IntArray] = (-1, np.zeros(0, np.int64))
        self.tables = tuple(
            BlockTables(rows, limits.max_blocks_per_row, limits.num_blocks, state) for _ in range(limits.num_kv_groups)
        )
        self.sampling = SamplingColumns(rows)
        self.rules = LogitsRules(limits.vocab_size, device)
        self.grammars = GrammarRows(grammars, limits.vocab_size)
        self.pooling = PoolingRows(rows, limits.hidden_size)
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """`[max_rows + 1] int64` on the device: the token each row sampled last; the last place is nobody's."""

    @property
    def limits(self) -> Limits:
        """What was given to the constructor."""
        return self._limits

    @staticmethod
    def state_words(limits: Limits) -> int:
        """Words of `DeviceState` that the block tables take."""
        return limits.num_kv_groups * limits.max_rows * limits.max_blocks_per_row

    @property
    def membership(self) -> int:
        """Changes whenever the set of decode rows, or a row's sampling, may have changed."""
        return self._membership

    @property
    def generation(self) -> IntArray:
        """`[max_rows]`: uses of each row within the epoch."""
        return self._generation

    @property
    def num_computed(self) -> IntArray:
        """`[max_rows]`: tokens of each row whose KV is computed."""
        return self._num_computed

    @property
    def num_prompt(self) -> IntArray:
        """`[max_rows]`: tokens of each row that the client gave."""
        return self._num_prompt

    def needs_host_tokens(self, row: int) -> bool:
        """Whether the row's next token must not be chosen before its last one is known on the host."""
        return row in self.grammars or self.rules.needs_host_tokens(row)

    def note_token(self, row: int, token: int) -> None:
        """What the row has sampled, for those that need it on the host."""
        self.rules.note_token(row, token)
        self.grammars.note_token(row, token)

    def request_id(self, row: int) -> str:
        """The request that occupies a row, or did so last."""
        return self._request_ids[row]

    def decode_rows(self) -> IntArray:
        """The rows that take part in every step, ascending. Not to be written to."""
        if self._decode_rows[0] != self._membership:
            active = (self._state == RowState.DECODE) & ~self._held & ~self._failed
            self._decode_rows = (self._membership, np.flatnonzero(active))
        return self._decode_rows[1]

    def leave(self, plan: plan_pb2.Plan) -> IntArray:
        """Makes the plan's leaves, the first of its differences, and returns their rows.

        Raises:
            PlanError: the plan breaks the contract.
        """
        if not plan.leaves:
            return _NO_ROWS
        try:
            rows = from_column(plan.leaves).astype(np.int64)
        except MalformedColumnError as error:
            raise PlanError(str(error)) from None
        self._check_rows(rows, "leave")
        self._remove(rows)
        return rows

    def change(self, plan: plan_pb2.Plan) -> None:
        """Makes the plan's other differences, which come after its leaves.

        Raises:
            PlanError: the plan breaks the contract.
        """
        try:
            for admission in plan.admissions:
                self._admit(admission)
            if plan.append_rows or plan.append_blocks or plan.append_groups:
                self._append(plan)
            if plan.holds:
                self._set_held(from_column(plan.holds), held=True)
            if plan.releases:
                self._set_held(from_column(plan.releases), held=False)
        except MalformedColumnError as error:
            raise PlanError(str(error)) from None

    def chunks(self, plan: plan_pb2.Plan) -> tuple[IntArray, IntArray]:
        """The plan's prefill chunks, rows ascending and their lengths; call after `change`.

        Raises:
            PlanError: a row that is not in prefill, or a length beyond its tokens.
        """
        if not plan.chunk_rows and not plan.chunk_lengths:
            return _NO_ROWS, _NO_ROWS
        try:
            columns = from_columns(plan.chunk_rows, plan.chunk_lengths)
        except MalformedColumnError as error:
            raise PlanError(str(error)) from None
        rows, lengths = (column.astype(np.int64) for column in columns)
        self._check_rows(rows, "chunk")
        if (self._state[rows] != RowState.PREFILL).any():
            raise PlanError("a chunk for a row that is not in prefill")
        if (lengths < 1).any() or (lengths > self._num_tokens[rows] - self._num_computed[rows]).any():
            raise PlanError("a chunk is empty or longer than what is left of its row's tokens")
        order = np.argsort(rows)
        return rows[order], lengths[order]

    def chunk_tokens(self, row: int, length: int) -> Int32Array:
        """The next `length` tokens of a row in prefill."""
        start = int(self._num_computed[row])
        return self._prompts[row][start : start + length]

    def check_room(self, rows: IntArray, ends: IntArray) -> None:
        """Checks that each row's blocks hold its tokens up to position `ends` (exclusive); `rows` is not empty.

        Raises:
            PlanError: a row lacks blocks, or grows beyond the longest sequence.
        """
        if int(ends.max()) > self._limits.max_model_len:
            raise PlanError(f"a row grows beyond {self._limits.max_model_len} tokens")
        for tables in self.tables:
            if (tables.lengths[rows] * self._limits.block_size < ends).any():
                raise PlanError("a row takes part without a block for its next token")

    def advance(self, chunk_rows: IntArray, chunk_lengths: IntArray) -> npt.NDArray[np.bool_]:
        """Counts a step's tokens as computed: one per decode row, a chunk per row in `chunk_rows`.

        Returns:
            Which of `chunk_rows` have now finished prefill, as a boolean array; they are decode rows from here on, or
            done.
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

    def fail(self, rows: IntArray, generations: IntArray) -> None:
        """Takes rows out of all further steps until they leave; uses of rows that have ended are not touched."""
        alive = (self._state[rows] != RowState.FREE) & (self._generation[rows] == generations)
        self._failed[rows[alive]] = True
        self._any_failed = True
        self._membership += 1

    def has_failed(self, rows: IntArray, generations: IntArray) -> npt.NDArray[np.bool_]:
        """For each use of a row whether it is the present one and has failed."""
        if not self._any_failed:
            return np.zeros(len(rows), np.bool_)
        failed: npt.NDArray[np.bool_] = self._failed[rows] & (self._generation[rows] == generations)
        return failed

    def failed_rows(self) -> IntArray:
        """Rows that would be decode rows had they not failed, ascending."""
        if not self._any_failed:
            return _NO_ROWS
        return np.flatnonzero(self._failed & (self._state == RowState.DECODE) & ~self._held)

    def clear(self) -> IntArray:
        """Drops every row, for a new epoch, and returns which there were."""
        rows = np.flatnonzero(self._state != RowState.FREE)
        self._remove(rows)
        self._generation.fill(0)
        self._any_failed = False
        for tables in self.tables:
            tables.clear()
        if self._state_on_device is not None:
            self._state_on_device.forget()
        return rows

    def publish(self) -> None:
        """Brings the device's copy of the block tables, and of what else its state holds, up to date."""
        if self._state_on_device is not None:
            self._state_on_device.publish()

    def _check_rows(self, rows: npt.NDArray[np.integer], what: str) -> None:
        """That the rows are in range, occupied and named once."""
        if int(rows.min()) < 0 or int(rows.max()) >= self._limits.max_rows:
            raise PlanError(f"{what}: a row is outside [0, {self._limits.max_rows})")
        if (self._state[rows] == RowState.FREE).any():
            raise PlanError(f"{what}: a row that is not known")
        if len(rows) > 1 and len(np.unique(rows)) != len(rows):
            raise PlanError(f"{what}: a row is named twice")

    def _remove(self, rows: IntArray) -> None:
        self._state[rows] = RowState.FREE
        for row in rows.tolist():
            self._prompts.pop(row, None)
            self.rules.leave(row)
            self.grammars.leave(row)
            self.pooling.leave(row)
        self._membership += 1

    def _admit(self, admission: plan_pb2.Admission) -> None:
        row, limits = admission.row, self._limits
        if row >= limits.max_rows:
            raise PlanError(f"admission: row {row} is outside [0, {limits.max_rows})")
        if self._state[row] != RowState.FREE:
            raise PlanError(f"admission: row {row} is occupied")
        if admission.generation <= self._generation[row]:
            raise PlanError(f"admission: generation {admission.generation} of row {row} is not new")
        tokens = from_column(admission.token_ids)
        if not 0 < len(tokens) <= limits.max_model_len:
            raise PlanError(f"admission: {len(tokens)} tokens, outside [1, {limits.max_model_len}]")
        if int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size:
            raise PlanError("admission: a token id outside the vocabulary")
        if admission.num_prompt_tokens > len(tokens) or admission.num_computed_tokens >= len(tokens):
            raise PlanError("admission: more prompt or computed tokens than there are, or none left to compute")
        if len(admission.block_tables) != len(self.tables):
            raise PlanError(f"admission: {len(admission.block_tables)} block tables for {len(self.tables)} KV groups")
        self.pooling.admit(row, admission)
        self._state[row] = RowState.PREFILL
        self._generation[row] = admission.generation
        self._held[row] = self._failed[row] = False
        self._num_tokens[row] = len(tokens)
        self._num_computed[row] = admission.num_computed_tokens
        self._num_prompt[row] = admission.num_prompt_tokens
        self._prompts[row] = tokens
        self._request_ids[row] = admission.request_id
        for tables, column in zip(self.tables, admission.block_tables, strict=True):
            blocks = from_column(column)
            if len(blocks) * limits.block_size < admission.num_computed_tokens:
                raise PlanError("admission: fewer blocks than its computed tokens need")
            tables.replace(row, blocks)
        self.sampling.set(row, admission.sampling)
        self.rules.admit(row, admission.sampling, tokens, admission.num_prompt_tokens)
        stops = from_column(admission.sampling.stop_token_ids)
        self.grammars.admit(row, admission.grammar, stops, tokens[admission.num_prompt_tokens :])
        self._membership += 1

    def _append(self, plan: plan_pb2.Plan) -> None:
        rows, blocks = from_columns(plan.append_rows, plan.append_blocks)
        groups = from_columns(plan.append_rows, plan.append_groups)[1] if plan.append_groups else np.zeros_like(rows)
        if len(rows) == 0:
            return
        self._check_rows(np.unique(rows), "append")
        if int(groups.min()) < 0 or int(groups.max()) >= len(self.tables):
            raise PlanError(f"append: a KV group outside [0, {len(self.tables)})")
        for group, tables in enumerate(self.tables):
            chosen = groups == group
            tables.append(rows[chosen].astype(np.int64), blocks[chosen])

    def _set_held(self, rows: Int32Array, *, held: bool) -> None:
        what = "hold" if held else "release"
        self._check_rows(rows, what)
        if (self._state[rows] != RowState.DECODE).any() or (self._held[rows] == held).any():
            raise PlanError(f"{what}: a row that is not in decode, or is so already")
        self._held[rows] = held
        self._membership += 1
