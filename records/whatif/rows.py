"""Tracks a worker's rows from its plans, as a worker does, and derives the work of each step.

Records and simulations both use this class, so that the step-time model sees the same features. A plan contains only
the maximum number of drafts that a row may verify, not the actual number. The caller therefore adds a step's drafts to
its shape, and advances the rows by the accepted drafts.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from records.whatif.figures import Numbers
from scheduler_svc.core.interface.arrays import BoolArray, IndexArray
from scheduler_svc.core.interface.events import WorkerHello

FREE = -1


class Shape(NamedTuple):
    """Amounts of work in a step, which determine its time."""

    decodes: int
    """Number of decoding rows, with one token each."""
    prefill: int
    """Number of prompt tokens."""
    context: int
    """Number of tokens whose KV the decode rows read, summed over the rows."""
    prefill_context: int
    """Number of tokens whose KV the prompt tokens read, summed over the prompt tokens."""
    copied_blocks: int = 0
    """Number of blocks that are swapped between device and host."""
    drafts: int = 0
    """Number of draft tokens that the decode rows verify."""


class Admitted(NamedTuple):
    """A request that gets a row."""

    row: int
    generation: int
    request: int
    """Number of the request in its run."""
    num_tokens: int
    num_computed: int
    samples: bool
    """Whether the prompt's last chunk samples a token, which is not the case for an embedding."""
    num_blocks: int


class Work(NamedTuple):
    """A step of a worker."""

    shape: Shape
    rows: IndexArray
    """Rows that sample, ascending."""
    requests: Numbers
    """Request numbers for the rows in `rows`."""
    lengths: Numbers
    """Sequence lengths of these rows, including the sampled token and excluding drafts."""
    most_drafts: Numbers
    """Maximum number of drafts for each of these rows, limited by the plan, the row's blocks and the model's length."""
    pooled: list[tuple[int, int]]
    """(row, generation) for each embedding that the step completes, ascending."""
    num_rows: int
    """Number of rows that compute in the step."""


class Rows:
    """The rows of one worker."""

    def __init__(self, hello: WorkerHello) -> None:
        size = hello.max_rows
        self._block_size, self._max_length = hello.block_size, hello.model.max_model_len
        self._request: Numbers = np.full(size, FREE, np.int64)
        self._generation: Numbers = np.zeros(size, np.int64)
        self._length: Numbers = np.zeros(size, np.int64)
        """Tokens whose KV is computed."""
        self._left: Numbers = np.zeros(size, np.int64)
        """Tokens to compute before the row decodes."""
        self._held: BoolArray = np.zeros(size, np.bool_)
        self._samples: BoolArray = np.ones(size, np.bool_)
        self._num_blocks: Numbers = np.zeros(size, np.int64)
        self._draft_limit: Numbers = np.zeros(size, np.int64)
        self._has_limits = False
        """Whether a row had a draft limit above 0."""

    def leave(self, rows: Sequence[int] | IndexArray) -> None:
        """Free rows."""
        if len(rows):
            self._request[rows] = FREE

    def admit(self, admissions: Iterable[Admitted]) -> None:
        """Assign rows to requests."""
        for each in admissions:
            row = each.row
            self._request[row] = each.request
            self._generation[row] = each.generation
            self._length[row] = each.num_computed
            self._left[row] = each.num_tokens - each.num_computed
            self._held[row] = False
            self._samples[row] = each.samples
            self._num_blocks[row] = each.num_blocks
            self._draft_limit[row] = 0

    def grow(self, rows: Sequence[int] | IndexArray) -> None:
        """Add a block to each row; a row may occur several times."""
        if len(rows):
            np.add.at(self._num_blocks, rows, 1)

    def limit_drafts(self, rows: Sequence[int] | IndexArray, limits: Sequence[int] | IndexArray) -> None:
        """Set how many draft tokens each of these rows may verify per step from now on."""
        if len(rows):
            self._draft_limit[rows] = limits
            self._has_limits = True

    def accept(self, work: Work, counts: Numbers) -> None:
        """Advance a step's rows by their accepted drafts, `[n]`; skip rows that now have another request."""
        present = self._request[work.rows] == work.requests
        self._length[work.rows[present]] += counts[present]

    def hold(self, holds: Sequence[int] | IndexArray, releases: Sequence[int] | IndexArray) -> None:
        """Hold rows out of steps from now on, and release others."""
        if len(holds):
            self._held[holds] = True
        if len(releases):
            self._held[releases] = False

    def compute(
        self, chunk_rows: Sequence[int] | IndexArray, chunk_lengths: Sequence[int] | IndexArray, copied_blocks: int = 0
    ) -> Work:
        """Advance the rows by a step with these chunks; return the step's work.

        All other rows with computed prompts decode, unless they are held out.
        """
        decodes = (self._request != FREE) & (self._left == 0) & ~self._held & self._samples
        self._length += decodes
        prefill = prefill_context = 0
        num_decodes, context = int(decodes.sum()), int(self._length[decodes].sum())
        samples = decodes
        pooled: list[tuple[int, int]] = []
        if len(chunk_rows):
            samples = decodes.copy()
            for row, length in zip(_list(chunk_rows), _list(chunk_lengths), strict=True):
                start = int(self._length[row])
                prefill += length
                prefill_context += length * start + length * (length + 1) // 2
                self._length[row] = start + length
                self._left[row] -= length
                if self._left[row] <= 0:
                    self._left[row] = 0
                    if self._samples[row]:
                        samples[row] = True
                    else:
                        pooled.append((row, int(self._generation[row])))
        rows = np.flatnonzero(samples)
        most_drafts = np.zeros(len(rows), np.int64)
        if self._has_limits:
            room = np.minimum(self._max_length - 1, self._num_blocks[rows] * self._block_size) - self._length[rows]
            most_drafts = np.where(decodes[rows], np.clip(room, 0, self._draft_limit[rows]), 0)
        shape = Shape(num_decodes, prefill, context, prefill_context, copied_blocks)
        return Work(
            shape,
            rows,
            self._request[rows],
            self._length[rows] + 1,
            most_drafts,
            sorted(pooled),
            num_decodes + len(chunk_rows),
        )


def _list(values: Sequence[int] | npt.NDArray[np.intp]) -> Sequence[int]:
    if isinstance(values, np.ndarray):
        found: list[int] = values.tolist()
        return found
    return values
