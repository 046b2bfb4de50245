"""A worker that checks every rule in plan.proto and replaces the model with arithmetic.

KV is modelled slot by slot: each slot holds a value for the sequence up to the token written there (see `oracle`). A
step executes in the order that the protocol prescribes. The worker checks that a row reads only what the row or its
prefix wrote. The cost of the checks is proportional to a step's changes:

* A block has one writer: the row that got the block when no block table contained it. Other rows may share the block
  only for KV that is already computed.
* When a row gets blocks with computed KV, they are compared slot by slot, after the step's writes.
* A row may get a block for writing, or a copy may write a block, only if no step in flight uses that block. The same
  holds for host blocks. A step's copies are made before its other operations.

By induction, no slot that a row relies on ever changes.

With `max_draft_tokens`, decode rows also verify drafts. The generator decides how many drafts are proposed, and which
of them equal the row's next tokens. The KV of a rejected draft is invalid, and must be written again before it is read.

With `state_bytes`, a row also has a recurrent state, which is a value for the sequence up to its newest computed token.
Each token of a row reads and replaces this state. The state remains in the slot when the request leaves the row. With
`num_checkpoints`, plans save states to checkpoints, and rows begin with the state of a checkpoint. A row that begins
with computed tokens needs a checkpoint. With `num_host_states`, the states of rows that leave are saved to host memory,
and those of checkpoints are copied there. A plan makes these copies before it reads or saves any other state.
After drafts were rejected, a row has no state that can be saved until its next step. The state of a decode row may be
saved later: at the beginning of the step in which the row has the given number of tokens. Its drafts end there.

With several KV groups, a row also has a table for each group with a window. In every step, the worker compares all
slots that the row's new tokens can see through the window with the expected values, which differ by group.

Rows fail on demand. With `spoil`, their KV becomes invalid (NaN), and every row that reads it fails too. Without
`spoil`, only their sampling fails. Once the scheduler knows of a failure with NaN, no row may get KV that the failed
row wrote.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from records.rules.oracle import EMPTY, SCORED, VOCAB, embedding_of, extend, scores_of, token_after
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission, WindowTables
from shared.request_spec import Pooling

_NOTHING = -1
"""Content of a slot that was never written."""
_SPOILT = -2
_REJECTED = -3
"""Content of a slot that a rejected draft wrote."""
_ACCEPTED_SHARE = 0.7


@dataclass(slots=True, eq=False)
class Spoil:
    """Invalid KV (NaN), together with all KV that was computed from it."""


@dataclass(slots=True, eq=False)
class Row:
    """A row of the worker's table."""

    index: int
    generation: int
    name: StreamName
    tokens: list[int]
    values: list[int]
    """Value of the sequence up to each token."""
    blocks: list[int]
    computed: int
    admitted: int
    """Sequence number of the admission; a smaller number is an earlier admission."""
    num_prompt: int
    pooling: Pooling = Pooling.NONE
    num_admitted: int = 0
    """Number of tokens at admission."""
    num_given: int = 0
    """Number of those tokens whose KV was already computed."""
    decoding: bool = False
    held: bool = False
    draft_limit: int = 0
    drafted_step: int = 0
    """The last step in which the row may have verified drafts."""
    fails: bool = False
    spoil: Spoil | None = None
    failed_at: int | None = None
    """Number of tokens that the scheduler knows if the row has failed."""
    reported_step: int | None = None
    """The first step whose result reported that the row failed with NaN."""
    windows: list[list[int]] = field(default_factory=list)
    """Blocks of each position in the KV groups with a window, from `first_window` on."""
    first_window: int = 0
    first_own_window: int = 0
    """First position whose window blocks the row writes, or whose KV was copied back from the host for the row."""
    window_period: int = 0
    num_window_blocks: int = 0
    """Window blocks that the row has taken."""
    scored: bool = False
    """Whether the request asks for log-probabilities."""
    num_prompt_unscored: int = 0
    """Number of prompt tokens whose log-probabilities are not sent yet; all are sent with the first token."""

    def append(self, token: int) -> None:
        """Append a sampled token."""
        self.values.append(extend(self.values[-1], token, len(self.tokens)))
        self.tokens.append(token)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A saved recurrent state."""

    state: tuple[int, int]
    """Number of tokens, and the value of the sequence up to them."""
    writer: Row


@dataclass(slots=True)
class ModelWorker:
    """A worker that executes plans; every broken rule raises a `ViolationError`."""

    peer: ev.Peer
    num_blocks: int
    block_size: int
    max_rows: int
    max_tokens_per_step: int = 64
    max_model_len: int = 4096
    fingerprint: str = "f"
    break_even_context: int = 0
    state_bytes: int = 0
    num_checkpoints: int = 0
    num_host_states: int = 0
    num_kv_groups: int = 1
    window: int = 0
    window_chunk: int = 0
    epoch: int = 0
    last_step: int = 0
    answered_step: int = 0
    """Newest step whose result the scheduler has received; set by the code that delivers results."""
    num_host_blocks: int = 0
    num_disk_blocks: int = 0
    copy_s: float = 0.0
    """Seconds to copy one block; 0 if the worker does not report this."""
    copies_overlap: bool = False
    """Whether copies overlap with steps and delay none. Otherwise they delay the step by their whole time."""
    max_draft_tokens: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    """Decides how many drafts are proposed and accepted."""
    num_usable: int = 0
    """Number of blocks that the scheduler has agreed to use; 0 for all."""
    host_in_use: dict[int, bool] = field(default_factory=dict)
    """Host blocks of disk jobs under way, and whether the job writes them."""
    rows: dict[int, Row] = field(default_factory=dict)
    step_rows: list[Row] = field(default_factory=list)
    """The rows for which the newest plan computed something."""
    _admissions: int = 0
    _generations: dict[int, int] = field(default_factory=dict)
    _values: list[int] = field(default_factory=list)
    """[num_blocks * block_size]: the content of each slot."""
    _holders: list[int] = field(default_factory=list)
    """Per block, the number of rows whose tables contain it."""
    _writer: list[Row | None] = field(default_factory=list)
    """Per block, the row that may write it."""
    _last_named: list[int] = field(default_factory=list)
    """Per block, the last step that used it; tables that still contain the block do not count as use."""
    _swapped_in: list[list[int]] = field(default_factory=list)
    """For each of the plan's copies to the device, its device blocks."""
    _used_before: dict[int, int] = field(default_factory=dict)
    """Device blocks that the plan copies to the host: the last step before this one that used them."""
    _spoils: dict[int, Spoil] = field(default_factory=dict)
    """Blocks with an invalid slot; host blocks are numbered after the device blocks."""
    _states: dict[int, tuple[int, int]] = field(default_factory=dict)
    """For each row index, the number of tokens in the recurrent state, and the state's value for them."""
    _late: dict[int, int] = field(default_factory=dict)
    """Rows whose state is rolled back only by their next step, because drafts were rejected, with the number of tokens
    that this step computes again.
    """
    _due: dict[int, tuple[Row, int]] = field(default_factory=dict)
    """By checkpoint: a row whose state is saved there, and the number of its tokens then."""
    _checkpoints: dict[int, _Checkpoint] = field(default_factory=dict)
    """By checkpoint, or place in host memory: its content."""

    def hello(self, worker_id: str = "w", reason: ev.HelloReason = ev.HelloReason.STARTED) -> ev.WorkerHello:
        """Return the worker's first message."""
        return ev.WorkerHello(
            worker=self.peer,
            worker_id=worker_id,
            model=ev.ModelFacts(
                name="m",
                architecture="Model",
                fingerprint=self.fingerprint,
                max_model_len=self.max_model_len,
                vocab_size=VOCAB,
                dtype="float32",
                eos_token_ids=(),
                hidden_size=1,
                break_even_context=self.break_even_context,
                state_bytes=self.state_bytes,
            ),
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_rows=self.max_rows,
            max_tokens_per_step=self.max_tokens_per_step,
            num_host_blocks=self.num_host_blocks,
            num_disk_blocks=self.num_disk_blocks,
            num_checkpoints=self.num_checkpoints,
            num_host_states=self.num_host_states,
            num_kv_groups=self.num_kv_groups,
            window=self.window,
            window_chunk=self.window_chunk,
            max_draft_tokens=self.max_draft_tokens,
            reason=reason,
        )

    def welcome(self, epoch: int) -> None:
        """Start an epoch and drop all rows."""
        self.epoch, self.last_step, self.answered_step = epoch, 0, 0
        self.rows.clear()
        self.host_in_use.clear()
        self._generations.clear()
        self._spoils.clear()
        self._used_before = {}
        self._states.clear()
        self._late.clear()
        self._due.clear()
        self._checkpoints.clear()
        # Host blocks are numbered after all device blocks.
        num_all = self.num_blocks + self.num_host_blocks
        self._values = [_NOTHING] * (num_all * self.block_size)
        self._holders = [0] * num_all
        self._writer = [None] * num_all
        self._last_named = [0] * num_all

    def fail(self, row: int, *, spoil: bool) -> None:
        """Make the row fail when it next samples. With `spoil`, its KV is invalid from the next step on."""
        self.rows[row].fails = True
        if spoil and self.rows[row].spoil is None:
            self.rows[row].spoil = Spoil()

    @property
    def num_unnamed(self) -> int:
        """Number of usable device blocks that no row's table names."""
        return self._holders[: self.num_usable or self.num_blocks].count(0)

    @property
    def longest_window_chunk(self) -> int:
        """Most tokens of one row in a step because of windows; 0 without windows."""
        return 0 if self.num_kv_groups == 1 else max(self.window_chunk, 1 + self.max_draft_tokens)

    def max_window_blocks(self, num_positions: int) -> int:
        """Return the most window blocks that a sequence of so many blocks holds without boundaries."""
        if self.num_kv_groups == 1:
            return 0
        reach = self.window - 1 + self.longest_window_chunk
        # A prefix may end at any block, and the window before it is shared.
        in_reach = (reach + self.block_size - 2) // self.block_size + 1
        tail = -(-(self.window - 1) // self.block_size)
        return (self.num_kv_groups - 1) * min(num_positions, in_reach + tail)

    def max_context(self, num_blocks: int) -> int:
        """Return the number of tokens of the longest sequence that fits into so many blocks."""
        longest = num_blocks
        while longest + self.max_window_blocks(longest) > num_blocks:
            longest -= 1
        return min(self.max_model_len, longest * self.block_size)

    def writer(self, block: int) -> StreamName | None:
        """Return the stream whose KV is in the block; None if the block has no writer."""
        row = self._writer[block]
        return row.name if row is not None else None

    def execute(self, plan: Plan) -> ev.StepDone:
        """Execute one step; return its result."""
        if plan.epoch != self.epoch or plan.worker != self.peer:
            raise ViolationError("plan.epoch", f"a plan of epoch {plan.epoch} in epoch {self.epoch}")
        if plan.step != self.last_step + 1:
            raise ViolationError("plan.step", f"step {plan.step} after {self.last_step}")
        self.last_step = plan.step
        self._save_due()
        self._save_to_host(plan)
        self._keep_states(plan)
        for index in plan.leaves.tolist():
            self._leave(index)
        host = self.num_blocks
        outs = [(copy.sources.tolist(), (copy.targets + host).tolist()) for copy in plan.swap_outs]
        ins = [((copy.sources + host).tolist(), copy.targets.tolist()) for copy in plan.swap_ins]
        # The copies to the host come first, so the plan itself may already reuse their sources.
        self._used_before = {block: self._last_named[block] for sources, _ in outs for block in sources}
        self._swapped_in = [targets for _, targets in ins]
        # Process swaps before admissions, because a row admitted in this plan may share the swapped-in blocks.
        for _, targets in outs + ins:
            self._check_unused(targets)
        for sources, targets in outs:
            self._check_disk(targets, reads=False)
            self._copy(sources, targets)
        self._copy_on_device(plan.copy_sources.tolist(), plan.copy_targets.tolist())
        admitted = [(self._admit(admission), admission.num_computed_tokens) for admission in plan.admissions]
        windowed: list[list[int]] = plan.append_windows.reshape(-1, max(1, self.num_kv_groups - 1)).tolist()
        if windowed and len(windowed) != len(plan.append_rows):
            raise ViolationError(
                "plan.append", f"{len(windowed)} positions of windows for {len(plan.append_rows)} rows"
            )
        for place, (index, block) in enumerate(
            zip(plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True)
        ):
            row = self._row(index, "append")
            row.blocks.append(block)
            self._name_block(row, block, fresh=True)
            if row.windows:
                self._append_window(row, windowed[place] if windowed else [])
        for index in plan.holds.tolist():
            row = self._row(index, "hold")
            if row.held or not row.decoding:
                raise ViolationError("plan.hold", f"row {index} is held already or in prefill", row.name)
            row.held = True
        for index in plan.releases.tolist():
            row = self._row(index, "release")
            if not row.held:
                raise ViolationError("plan.hold", f"release of row {index}, which is not held", row.name)
            row.held = False
        for index, limit in zip(plan.draft_rows.tolist(), plan.draft_limits.tolist(), strict=True):
            row = self._row(index, "draft limit")
            if not 0 <= limit <= self.max_draft_tokens or limit == row.draft_limit:
                what = f"draft limit {limit} of row {index}, of at most {self.max_draft_tokens}"
                raise ViolationError("plan.drafts", what, row.name)
            row.draft_limit = limit
        for sources, targets in ins:
            self._check_disk(sources, reads=True)
            self._copy(sources, targets)
        for row, given in admitted:
            self._own_swapped(row, given)
        for admission in plan.admissions:
            self._restore(admission)
        return self._forward(plan, admitted)

    def _own_swapped(self, row: Row, given: int) -> None:
        """Let the row of a preempted request write the blocks copied back for it: its last one, and its window."""
        num_full = -(-given // self.block_size)
        in_window = self._swapped_window(row, row.windows)
        is_swapped = row.blocks[:num_full] in self._swapped_in if not row.windows else bool(in_window)
        if given % self.block_size and is_swapped:
            self._writer[row.blocks[num_full - 1]] = row
        for block in in_window:
            self._check_not_known_as_spoilt(row, block)
            self._writer[block] = row

    def _swapped_window(self, row: Row, positions: list[list[int]]) -> list[int]:
        """Return the window blocks that are copied back for a preempted request, together with its full blocks.

        The tail of a cached prefix is copied separately.

        Args:
            row: the row.
            positions: the window blocks of each of its positions.
        """
        num_full = -(-row.num_given // self.block_size)
        for targets in self._swapped_in:
            if (
                num_full
                and targets[:num_full] == row.blocks[:num_full]
                and positions[:1] == [targets[num_full : num_full + self.num_kv_groups - 1]]
            ):
                return targets[num_full:]
        return []

    def _check_not_known_as_spoilt(self, row: Row, block: int) -> None:
        """Check that a window block that a row gets is not known to contain NaN."""
        writer = self._writer[block]
        reported = None if writer is None else writer.reported_step
        content = self._values[block * self.block_size : (block + 1) * self.block_size]
        if _SPOILT in content and reported is not None and reported <= self.answered_step:
            what = f"window block {block} was spoilt by a row that failed in step {reported}"
            raise ViolationError("kv.spoilt", what, row.name)

    # ---------------------------------------------------------------- rows and tables

    def _row(self, index: int, what: str) -> Row:
        row = self.rows.get(index)
        if row is None:
            raise ViolationError("plan.row", f"{what} for row {index}, which is not occupied")
        return row

    def _leave(self, index: int) -> None:
        row = self._row(index, "leave")
        del self.rows[index]
        self._late.pop(index, None)
        self._due = {checkpoint: due for checkpoint, due in self._due.items() if due[0] is not row}
        for block in row.blocks:
            self._holders[block] -= 1
            self._last_named[block] = self.last_step - 1

    def _admit(self, admission: RowAdmission) -> Row:
        index, spec, name = admission.row, admission.spec, StreamName(admission.frontend, admission.stream)
        if index in self.rows or not 0 <= index < self.max_rows:
            raise ViolationError("plan.admission", f"row {index} is occupied or does not exist", name)
        if admission.generation <= self._generations.get(index, 0):
            raise ViolationError("plan.admission", f"generation {admission.generation} of row {index} is not new", name)
        self._generations[index] = admission.generation
        tokens: list[int] = admission.token_ids.tolist()
        if not 0 < spec.num_prompt_tokens <= len(tokens) or len(tokens) > self.max_model_len:
            raise ViolationError("plan.admission", f"{len(tokens)} tokens", name)
        if not 0 <= admission.num_computed_tokens < len(tokens):
            raise ViolationError("plan.admission", f"{admission.num_computed_tokens} of {len(tokens)} computed", name)
        if spec.pooling == Pooling.MEAN and admission.num_computed_tokens:
            raise ViolationError("plan.pooling", f"{admission.num_computed_tokens} tokens are left out of a mean", name)
        value, values = EMPTY, []
        for position, token in enumerate(tokens):
            value = extend(value, token, position)
            values.append(value)
        computed = admission.num_computed_tokens
        blocks = admission.blocks.tolist()
        self._admissions += 1
        row = Row(
            index=index,
            generation=admission.generation,
            name=name,
            tokens=tokens,
            values=values,
            blocks=blocks,
            computed=computed,
            admitted=self._admissions,
            num_prompt=spec.num_prompt_tokens,
            pooling=Pooling(spec.pooling),
            num_admitted=len(tokens),
            num_given=computed,
        )
        if spec.sampling == SCORED:
            row.scored, row.num_prompt_unscored = True, spec.num_prompt_tokens if computed == 0 else 0
        self.rows[index] = row
        self._admit_windows(row, admission.windows)
        for number, block in enumerate(row.blocks):
            self._name_block(row, block, fresh=(number + 1) * self.block_size > computed)
        return row

    def _name_block(self, row: Row, block: int, *, fresh: bool) -> None:
        """Record that a table contains a block; `fresh` means that the row will write the block."""
        if not 0 <= block < (self.num_usable or self.num_blocks):
            raise ViolationError("plan.block", f"block {block} does not exist", row.name)
        self._holders[block] += 1
        if not fresh:
            return
        if self._holders[block] > 1:
            raise ViolationError("kv.exclusive", f"block {block} is given to two rows", row.name)
        self._writer[block] = row
        used = self._used_before.get(block, self._last_named[block])
        if used > self.answered_step:
            raise ViolationError(
                "kv.reuse",
                f"block {block} is reused in step {self.last_step}; step {used}, which may use it, is not answered",
                row.name,
            )

    def _admit_windows(self, row: Row, windows: WindowTables | None) -> None:
        """Check the tables for windows. The row writes all blocks after those with computed KV."""
        if (windows is None) != (self.num_kv_groups == 1):
            raise ViolationError("plan.admission", f"row {row.index} lacks tables for windows", row.name)
        if windows is None:
            return
        positions = windows.tables.T.tolist()
        is_swapped = bool(self._swapped_window(row, positions))
        if (row.num_given % self.block_size and not is_swapped) or len(windows.tables) != self.num_kv_groups - 1:
            raise ViolationError("plan.admission", f"{len(windows.tables)} tables after {row.num_given}", row.name)
        num_given = 0 if is_swapped else row.num_given // self.block_size
        row.first_window, row.window_period = windows.first, windows.period
        end = windows.first + len(positions)
        if end > len(row.blocks) or (end < len(row.blocks) and len(positions) < windows.period):
            raise ViolationError("window.table", f"the tables end at position {end} of {len(row.blocks)}", row.name)
        while len(positions) < len(row.blocks) - windows.first:
            positions.append(positions[-windows.period])
        row.windows = positions
        row.first_own_window = max(num_given, windows.first)
        own = windows.tables[:, row.first_own_window - windows.first :].ravel().tolist()
        given: set[int] = set()
        for block in own:
            if block in given:
                continue
            given.add(block)
            self._take_window_block(row, block)
        self._check_window_bound(row)

    def _append_window(self, row: Row, blocks: list[int]) -> None:
        """Add a position to the row's windows, with new blocks, or with those of a period earlier."""
        if blocks and blocks[0] >= 0:
            for block in blocks:
                self._take_window_block(row, block)
            row.windows.append(blocks)
            self._check_window_bound(row)
        elif len(row.windows) < row.window_period:
            raise ViolationError("window.table", f"position {len(row.blocks) - 1} has no window blocks", row.name)
        else:
            row.windows.append(row.windows[-row.window_period])

    def _take_window_block(self, row: Row, block: int) -> None:
        if not 0 <= block < (self.num_usable or self.num_blocks):
            raise ViolationError("plan.block", f"block {block} does not exist", row.name)
        if self._holders[block]:
            raise ViolationError("kv.exclusive", f"block {block} of a window is in a table", row.name)
        if self._used_before.get(block, self._last_named[block]) > self.answered_step:
            raise ViolationError("kv.reuse", f"block {block} is reused in step {self.last_step}", row.name)
        self._writer[block] = row
        row.num_window_blocks += 1

    def _check_window_bound(self, row: Row) -> None:
        """Check that a row takes window blocks only with its tokens, and a bounded number."""
        num_tables = self.num_kv_groups - 1
        most = self.max_window_blocks(self.num_blocks) + 2 * num_tables * self.window
        num_positions = len(row.blocks) - row.first_own_window
        if row.num_window_blocks > min(most, num_tables * num_positions):
            what = f"{row.num_window_blocks} window blocks for {num_positions} positions"
            raise ViolationError("window.bound", what, row.name)

    def _window_blocks(self, row: Row, number: int) -> list[int]:
        """Return the row's blocks at a position of its tables for windows."""
        if not row.windows:
            return []
        at = number - row.first_window
        if not 0 <= at < len(row.windows):
            raise ViolationError("window.table", f"position {number} is not in the tables", row.name)
        return row.windows[at]

    def _write_windows(self, row: Row, position: int, value: int) -> None:
        number, offset = divmod(position, self.block_size)
        for group, block in enumerate(self._window_blocks(row, number)):
            if self._writer[block] is not row:
                raise ViolationError("kv.exclusive", f"a write to window block {block} of another row", row.name)
            self._values[block * self.block_size + offset] = value if value < 0 else value + group
            self._last_named[block] = self.last_step
            if value == _SPOILT and row.spoil is not None:
                self._spoils[block] = row.spoil

    def _read_windows(self, row: Row, start: int) -> None:
        """Check the KV that the row's tokens from `start` on attend to through windows."""
        if not row.windows:
            return
        for position in range(max(0, start - self.window + 1), row.computed):
            number, offset = divmod(position, self.block_size)
            for group, block in enumerate(self._window_blocks(row, number)):
                self._last_named[block] = self.last_step
                found = self._values[block * self.block_size + offset]
                if found == row.values[position] + group or (found == _SPOILT and row.spoil is not None):
                    continue
                if found != _SPOILT:
                    what = f"window block {block} does not hold token {position}"
                    raise ViolationError("window.content", what, row.name)
                writer = self._writer[block]
                reported = None if writer is None else writer.reported_step
                if reported is not None and reported <= self.answered_step and row.num_given:
                    what = f"window block {block} was spoilt by a row that failed in step {reported}"
                    raise ViolationError("kv.spoilt", what, row.name)
                row.fails, row.spoil = True, self._spoils[block]
                for own in range(start, row.computed):
                    self._spoil(row, own)

    def _spoil(self, row: Row, position: int) -> None:
        """Make the KV that a row has written invalid."""
        assert row.spoil is not None
        number, offset = divmod(position, self.block_size)
        block = row.blocks[number]
        self._values[block * self.block_size + offset] = _SPOILT
        self._spoils[block] = row.spoil
        self._write_windows(row, position, _SPOILT)

    def _check_unused(self, blocks: list[int]) -> None:
        """Check that no row reads the blocks, and no step without a result uses them."""
        for block in blocks:
            used = self._used_before.get(block, self._last_named[block])
            if self._holders[block] or used > self.answered_step:
                raise ViolationError("kv.reuse", f"block {block} is the target of a copy; step {used} may still use it")

    def _check_disk(self, blocks: list[int], *, reads: bool) -> None:
        """Check that no disk job uses the host blocks that a plan reads or writes."""
        for block in blocks:
            is_written = self.host_in_use.get(block - self.num_blocks)
            if is_written or (is_written is not None and not reads):
                raise ViolationError("disk.fence", f"host block {block - self.num_blocks} of a disk job is in a plan")

    def host_content(self, host_block: int) -> tuple[list[int], Spoil | None]:
        """Return the content of a host block, and its spoil."""
        block = self.num_blocks + host_block
        size = self.block_size
        return self._values[block * size : (block + 1) * size], self._spoils.get(block)

    def check_host_unused(self, host_block: int) -> None:
        """Check that no step without a result uses a host block."""
        self._check_unused([self.num_blocks + host_block])

    def host_writer(self, host_block: int) -> Row | None:
        """Return the row that computed the content of a host block."""
        return self._writer[self.num_blocks + host_block]

    def set_host_content(self, host_block: int, values: list[int], spoil: Spoil | None, writer: Row | None) -> None:
        """Change the content of a host block that no step uses."""
        block = self.num_blocks + host_block
        self._values[block * self.block_size : (block + 1) * self.block_size] = values
        self._writer[block] = writer
        self._spoils.pop(block, None)
        if spoil is not None:
            self._spoils[block] = spoil

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if len(sources) != len(set(targets)) or max(sources + targets) >= len(self._holders):
            raise ViolationError("plan.copy", f"blocks {sources} to {targets}")
        for block in sources + targets:
            self._last_named[block] = self.last_step
        self._copy_values(sources, targets)

    def _copy_on_device(self, sources: list[int], targets: list[int]) -> None:
        """Copy between device blocks. Tables may contain the targets only after this."""
        if not sources and not targets:
            return
        if len(sources) != len(set(targets)) or not set(sources).isdisjoint(targets):
            raise ViolationError("plan.copy", f"blocks {sources} to {targets}")
        if max(sources + targets) >= (self.num_usable or self.num_blocks):
            raise ViolationError("plan.copy", f"blocks {sources} to {targets} of the device")
        self._check_unused(targets)
        for source in sources:
            self._last_named[source] = self.last_step
        self._copy_values(sources, targets)

    def _copy_values(self, sources: list[int], targets: list[int]) -> None:
        size = self.block_size
        for source, target in zip(sources, targets, strict=True):
            self._values[target * size : (target + 1) * size] = self._values[source * size : (source + 1) * size]
            self._writer[target] = self._writer[source]
            self._spoils.pop(target, None)
            if source in self._spoils:
                self._spoils[target] = self._spoils[source]

    # ---------------------------------------------------------------- forward and sample

    def _forward(self, plan: Plan, admitted: list[tuple[Row, int]]) -> ev.StepDone:
        work = [(row, 1) for row in self.rows.values() if row.decoding and not row.held]
        if len(work) != plan.num_decodes:
            raise ViolationError("plan.decodes", f"{len(work)} rows decode, the plan counts on {plan.num_decodes}")
        num_tokens = len(work)
        chunk_rows: list[int] = plan.chunk_rows.tolist()
        if len(set(chunk_rows)) != len(chunk_rows):
            raise ViolationError("plan.chunk", f"two chunks for one row in {chunk_rows}")
        for index, length in zip(chunk_rows, plan.chunk_lengths.tolist(), strict=True):
            row = self._row(index, "chunk")
            if row.windows and length > self.longest_window_chunk:
                raise ViolationError("plan.chunk", f"chunk of {length} for row {index} with a window", row.name)
            if row.decoding or length < 1 or row.computed + length > len(row.tokens):
                raise ViolationError("plan.chunk", f"chunk of {length} for row {index} at {row.computed}", row.name)
            work.append((row, length))
            num_tokens += length
        if num_tokens != plan.num_tokens or num_tokens > self.max_tokens_per_step:
            raise ViolationError("plan.tokens", f"the result has {num_tokens} tokens, the plan has {plan.num_tokens}")
        # A row that computes tokens again has no drafts.
        num_more = sum(max(row.draft_limit, self._late.get(row.index, 0)) for row, _ in work if row.decoding)
        if num_tokens + num_more > self.max_tokens_per_step:
            raise ViolationError("plan.tokens", f"{num_tokens} tokens, and {num_more} drafts or repeated tokens")
        if not num_tokens and not plan.swap_outs and not plan.swap_ins and not len(plan.leaves):
            raise ViolationError("plan.tokens", "a plan without work")
        saves = self._check_saves(plan, {row.index: (row.computed, row.computed + length) for row, length in work})
        for index, num_tokens, checkpoint in saves:
            self._due.pop(checkpoint, None)
            if num_tokens == self.rows[index].computed:
                self._save(index, num_tokens, checkpoint)
            elif self.rows[index].decoding:
                self._due[checkpoint] = self.rows[index], num_tokens
        # As in every layer of a real model, all KV of the batch is written before any of it is read.
        for row, length in work:
            self._write(row, length, [each for each in saves if each[0] == row.index and not row.decoding])
        for row, given in admitted:
            self._read_prefix(row, given)
        for row, length in work:
            self._read_windows(row, row.computed - length)
        self.step_rows = [row for row, _ in work]
        return self._sample(plan, [row for row in self.step_rows if row.computed == len(row.tokens)])

    def _restore(self, admission: RowAdmission) -> None:
        """Give an admitted row the recurrent state of its checkpoint."""
        row, checkpoint = self.rows[admission.row], admission.checkpoint
        needs_one = bool(self.state_bytes and admission.num_computed_tokens)
        if needs_one != (checkpoint is not None):
            what = f"row {row.index} begins with {row.num_given} computed tokens and checkpoint {checkpoint}"
            raise ViolationError("state.prefix", what, row.name)
        if checkpoint is None:
            return
        found = self._checkpoints.get(checkpoint)
        if found is None:
            raise ViolationError("state.prefix", f"checkpoint {checkpoint} was never saved", row.name)
        self._states[row.index] = found.state
        num_tokens, value = found.state
        if value != _SPOILT:
            return
        writer = found.writer
        if writer.reported_step is not None and writer.reported_step <= self.answered_step:
            what = f"checkpoint {checkpoint} was spoilt by a row that failed in step {writer.reported_step}"
            raise ViolationError("state.spoilt", what, row.name)
        row.fails, row.spoil = True, writer.spoil
        self._states[row.index] = num_tokens, row.values[num_tokens - 1]

    def _save_to_host(self, plan: Plan) -> None:
        """Save the recurrent states of rows that leave to host memory."""
        leaves = set(plan.leaves.tolist())
        columns = plan.save_rows.tolist(), plan.save_lengths.tolist(), plan.save_checkpoints.tolist()
        for index, num_tokens, place in zip(*columns, strict=True):
            if place >= self.num_checkpoints:
                if index not in leaves or self._row(index, "save").computed != num_tokens:
                    what = f"the state of row {index} after {num_tokens} tokens is saved to the host"
                    raise ViolationError("plan.save", what)
                # A decode row with a fault fails in its next step. Before that step, its state is valid.
                row = self.rows[index]
                self._save(index, num_tokens, place, is_valid=row.failed_at is None)

    def _keep_states(self, plan: Plan) -> None:
        """Copy the states of checkpoints to host memory."""
        checkpoints, places = plan.kept_checkpoints.tolist(), plan.kept_places.tolist()
        is_host = [self.num_checkpoints <= each < self.num_checkpoints + self.num_host_states for each in places]
        written = [*places, *(each for each in plan.save_checkpoints.tolist() if each >= self.num_checkpoints)]
        if len(checkpoints) != len(places) or not all(is_host) or len(set(written)) < len(written):
            raise ViolationError("plan.keep", f"the states of checkpoints {checkpoints} are copied to {places}")
        for checkpoint, place in zip(checkpoints, places, strict=True):
            found = self._checkpoints.get(checkpoint)
            if found is None or not 0 <= checkpoint < self.num_checkpoints:
                raise ViolationError("plan.keep", f"checkpoint {checkpoint}, which was never saved, is copied")
            self._checkpoints[place] = found

    def _check_saves(self, plan: Plan, computed: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Return the plan's saves to checkpoints as (row, number of tokens, checkpoint).

        Args:
            plan: the plan.
            computed: by row in the step, its computed tokens before and after it.
        """
        columns = plan.save_rows.tolist(), plan.save_lengths.tolist(), plan.save_checkpoints.tolist()
        saves = list(zip(*columns, strict=True))
        checkpoints = columns[2]
        is_known = all(0 <= each < self.num_checkpoints + self.num_host_states for each in checkpoints)
        if not is_known or len(set(checkpoints)) < len(checkpoints):
            raise ViolationError("plan.save", f"states are saved to checkpoints {checkpoints}")
        saves = [save for save in saves if save[2] < self.num_checkpoints]
        for index, num_tokens, _ in saves:
            first, last = computed.get(index, (0, -1))
            if index in computed and self.rows[index].decoding:
                drafts = self.rows[index].drafted_step or self.rows[index].draft_limit
                last = len(self.rows[index].blocks) * self.block_size if drafts else last
            if not num_tokens > 0 or not first <= num_tokens <= last or num_tokens % self.block_size:
                raise ViolationError("plan.save", f"the state of row {index} after {num_tokens} tokens is saved")
        return saves

    def _save_due(self) -> None:
        """Save the states that were to be saved as soon as their rows have a number of tokens."""
        for checkpoint, (row, num_tokens) in list(self._due.items()):
            if row.computed >= num_tokens:
                del self._due[checkpoint]
                self._save(row.index, num_tokens, checkpoint)

    def _save(self, index: int, num_tokens: int, checkpoint: int, *, is_valid: bool = False) -> None:
        """Save the present state of a row, which must have `num_tokens` tokens unless the row has failed.

        Args:
            index: the row.
            num_tokens: number of its tokens.
            checkpoint: the checkpoint.
            is_valid: the row's fault has not changed the state.
        """
        row = self.rows[index]
        state = self._states.get(index, (0, EMPTY))
        if state[0] != num_tokens:
            what = f"the state of row {index} has {state[0]} tokens instead of the {num_tokens} to be saved"
            raise ViolationError("state.prefix", what, row.name)
        if index in self._late:
            what = f"the state of row {index} after {num_tokens} tokens is saved before it is rolled back"
            raise ViolationError("state.prefix", what, row.name)
        if row.failed_at is not None and num_tokens > row.failed_at:
            state = num_tokens, _NOTHING  # A real worker does not compute a failed row.
        elif row.spoil is not None and not is_valid:
            state = num_tokens, _SPOILT
        self._checkpoints[checkpoint] = _Checkpoint(state, row)

    def _write(self, row: Row, length: int, saves: Sequence[tuple[int, int, int]] = ()) -> None:
        size = self.block_size
        position = row.computed
        row.computed += length
        if row.computed > self.max_model_len:
            raise ViolationError("plan.length", f"token {row.computed} of at most {self.max_model_len}", row.name)
        if self.state_bytes:
            self._advance_state(row, position, saves)
        while position < row.computed:
            number, offset = divmod(position, size)
            if number >= len(row.blocks):
                raise ViolationError("kv.capacity", f"token {position} beyond the {len(row.blocks)} blocks", row.name)
            block = row.blocks[number]
            if self._writer[block] is not row:
                raise ViolationError("kv.exclusive", f"a write to block {block}, which is shared", row.name)
            count = min(size - offset, row.computed - position)
            if row.windows:
                for each in range(position, position + count):
                    self._write_windows(row, each, row.values[each] if row.spoil is None else _SPOILT)
            slot = block * size + offset
            if row.spoil is None:
                self._values[slot : slot + count] = row.values[position : position + count]
                if offset == 0:
                    self._spoils.pop(block, None)
            else:
                self._values[slot : slot + count] = [_SPOILT] * count
                self._spoils[block] = row.spoil
            position += count

    def _advance_state(self, row: Row, start: int, saves: Sequence[tuple[int, int, int]]) -> None:
        """Compute the row's recurrent state for its tokens from `start`; a new row has no state yet.

        Args:
            row: the row.
            start: the first of the tokens.
            saves: (row, number of tokens, checkpoint) of states to save in between.
        """
        self._late.pop(row.index, None)
        expected = (start, row.values[start - 1])
        if start and self._states.get(row.index) != expected:
            num_tokens = self._states.get(row.index, (0, EMPTY))[0]
            raise ViolationError(
                "state.prefix",
                f"the state of row {row.index} is not that of its first {start} tokens; it has {num_tokens} tokens",
                row.name,
            )
        for index, num_tokens, checkpoint in saves:
            if num_tokens > start:
                self._states[index] = num_tokens, row.values[num_tokens - 1]
                self._save(index, num_tokens, checkpoint)
        self._states[row.index] = (row.computed, row.values[row.computed - 1])

    def _next_token(self, row: Row) -> int:
        return token_after(row.values[-1])

    def _propose(self, row: Row) -> int:
        """Return the number of drafts for a row, within its draft limit, its blocks and the maximum length."""
        return min(self.rng.randint(0, row.draft_limit), self._room(row))

    def _room(self, row: Row) -> int:
        ends = [num_tokens for each, num_tokens in self._due.values() if each is row]
        return min(len(row.blocks) * self.block_size, self.max_model_len, *ends) - row.computed

    def _num_accepted(self, row: Row, num_drafts: int) -> int:
        """Return how many of the row's drafts are accepted."""
        num_accepted = 0
        while num_accepted < num_drafts and self.rng.random() < _ACCEPTED_SHARE:
            num_accepted += 1
        return num_accepted

    def _verify(self, row: Row, num_drafts: int) -> int:
        """Write the KV of drafts after the row's newest token; return the number of accepted drafts."""
        num_accepted = self._num_accepted(row, num_drafts)
        for _ in range(num_accepted):
            self._write(row, 1)
            row.append(self._next_token(row))
        self._read_windows(row, row.computed - num_accepted - 1)
        for position in range(row.computed, row.computed + num_drafts - num_accepted):
            block = row.blocks[position // self.block_size]
            if self._writer[block] is not row:
                raise ViolationError("kv.exclusive", f"a draft in block {block}, which is shared", row.name)
            self._values[block * self.block_size + position % self.block_size] = _REJECTED
            self._write_windows(row, position, _REJECTED)
        if self.state_bytes and num_drafts > num_accepted:
            self._late[row.index] = num_accepted + 1
        return num_accepted

    def _read_prefix(self, row: Row, given: int) -> None:
        """Compare the KV of the `given` tokens, which the row did not have to compute, with the expected values."""
        size = self.block_size
        for number in range(-(-given // size)):
            block = row.blocks[number]
            end = min(size, given - number * size)
            held = self._values[block * size : block * size + end]
            if held == row.values[number * size : number * size + end]:
                continue
            spoil = self._spoils.get(block) if _SPOILT in held else None
            if spoil is None:
                raise ViolationError("kv.prefix", f"block {block} does not hold tokens {number * size}…", row.name)
            writer = self._writer[block]
            if writer is not None and writer.reported_step is not None and writer.reported_step <= self.answered_step:
                raise ViolationError(
                    "kv.spoilt",
                    f"block {block} was spoilt by a row that failed in step {writer.reported_step}",
                    row.name,
                )
            row.fails, row.spoil = True, spoil
            # The KV that the row wrote in this step is invalid too.
            for position in range(given, row.computed):
                self._spoil(row, position)
            for checkpoint, found in self._checkpoints.items():
                if found.writer is row:
                    self._checkpoints[checkpoint] = replace(found, state=(found.state[0], _SPOILT))
            return

    @staticmethod
    def _scores(row: Row, token: int) -> Iterator[ev.RowScores]:
        if row.num_prompt_unscored > 1:
            prompt = scores_of(row.tokens[1 : row.num_prompt_unscored])
            yield ev.RowScores(row=row.index, generation=row.generation, prompt_index=1, scores=prompt)
        row.num_prompt_unscored = 0
        yield ev.RowScores(row=row.index, generation=row.generation, prompt_index=0, scores=scores_of([token]))

    def _sample(self, plan: Plan, rows: list[Row]) -> ev.StepDone:
        step = plan.step
        copies = plan.swap_outs + plan.swap_ins
        copied = sum(len(copy.sources) for copy in copies)
        rows.sort(key=lambda row: row.index)
        sampled: list[int] = []
        tokens: list[int] = []
        counts: list[int] = []
        draft_counts: list[int] = []
        failures: list[ev.FailedRow] = []
        scores: list[ev.RowScores] = []
        embeddings: list[ev.RowEmbedding] = []
        for row in rows:
            is_decode = row.decoding
            row.decoding = row.pooling is Pooling.NONE
            token = self._next_token(row)
            if row.fails:
                row.failed_at = len(row.tokens) if row.failed_at is None else row.failed_at
                kind = ev.FailureKind.INTERNAL if row.spoil is None else ev.FailureKind.NOT_FINITE
                failures.append(ev.FailedRow(row=row.index, generation=row.generation, kind=kind, reason=kind.name))
                if row.spoil is not None:
                    row.reported_step = row.reported_step or step
            elif not row.decoding:
                values = embedding_of(row.values, row.pooling)
                embeddings.append(ev.RowEmbedding(row=row.index, generation=row.generation, values=values))
            else:
                sampled.append(row.index)
                tokens.append(token)
                if row.scored:
                    scores += self._scores(row, token)
            if not row.decoding:
                continue
            row.append(token)
            if row.draft_limit:
                row.drafted_step = step
            if row.fails:
                continue
            num_drafts = self._propose(row) if is_decode and row.draft_limit else 0
            num_accepted = self._verify(row, num_drafts)
            if num_accepted:
                tokens += row.tokens[-num_accepted:]
                if row.scored:
                    for accepted in row.tokens[-num_accepted:]:
                        scores += self._scores(row, accepted)
            counts.append(num_accepted + 1)
            draft_counts.append(num_drafts)
        return ev.StepDone(
            worker=self.peer,
            epoch=self.epoch,
            step=step,
            rows=np.array(sampled, np.int32),
            tokens=np.array(tokens, np.int32),
            counts=np.array(counts, np.int32) if any(draft_counts) else None,
            draft_counts=np.array(draft_counts, np.int32) if any(draft_counts) else None,
            failures=tuple(failures),
            scores=scores,
            embeddings=embeddings,
            completed_copies=[copy.copy_id for copy in copies],
            copied_blocks=copied if self.copy_s else 0,
            copy_s=copied * self.copy_s,
            copy_delay_s=0.0 if self.copies_overlap else copied * self.copy_s,
        )
