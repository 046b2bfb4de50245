"""Result for one plan; plan.proto documents each field."""

import enum
from dataclasses import dataclass

from worker_svc.interface.arrays import FloatArray, Int32Array, IntArray


class FailureKind(enum.Enum):
    """Kind of a row's failure."""

    NOT_FINITE = enum.auto()
    """Logits or hidden states contain NaN or infinity, so the row's KV may contain them too."""
    NO_TOKEN_ALLOWED = enum.auto()
    """The request's constraints allow no token."""
    GRAMMAR_TOO_COSTLY = enum.auto()
    """The request's grammar exceeds the limit of work per token."""
    INTERNAL = enum.auto()
    """The worker cannot continue this row, and the request is not the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFailure:
    """One row's failure, which does not affect other rows."""

    row: int
    generation: int
    kind: FailureKind
    reason: str
    """One line for the client, no prompt content."""
    field: str = ""
    """The request field to change, as named in generation.proto; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A step's log-probabilities, in sections of consecutive tokens in one row.

    The columns have one element per section. Storing all sections in one value avoids an object per row in decode
    steps.
    """

    rows: tuple[int, ...]
    generations: tuple[int, ...]
    prompt_indices: tuple[int, ...]
    """0 for the token sampled in this step, otherwise the index of the section's first token in the prompt."""
    counts: tuple[int, ...]
    """Number of most likely tokens that each section includes, at most k."""
    firsts: tuple[int, ...]
    """First line of each section in `lines`."""
    num_tokens: tuple[int, ...]
    lines: Int32Array
    """`[n, 2 + 2k]`, one line per token: its rank from 1; the k most likely tokens, most likely first; then as float32
    its log-probability, and theirs."""


@dataclass(frozen=True, slots=True)
class RowEmbedding:
    """The vector of one row."""

    row: int
    generation: int
    values: FloatArray
    """`[hidden_size]`, finite, not scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReadings:
    """Readings of the device's own sensors; None for what cannot be read."""

    utilisation: float | None = None
    """Share of the time in which the device computed, 0 to 1."""
    memory_used: int | None = None
    """Memory in use by all processes, bytes."""
    memory_total: int | None = None
    power_w: float | None = None
    processor_clock_hz: float | None = None
    memory_clock_hz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Measurements of one step; durations in ns, timestamps as Unix ns."""

    received_unix_ns: int
    started_unix_ns: int
    prepare_ns: int
    forward_ns: int
    sample_ns: int
    idle_before_ns: int
    num_tokens: int
    copied_blocks: int = 0
    copy_ns: int = 0
    copy_delay_ns: int = 0
    energy_uj: int = 0
    """Energy of the step, uJ; 0 if not known."""
    idle_energy_uj: int = 0
    """Energy between the previous step and this one."""
    device: DeviceReadings | None = None
    """New readings of the device, if there are any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of one plan."""

    step: int
    rows: IntArray
    """`[R]`: the rows that sampled."""
    tokens: Int32Array
    """`[sum of counts]`, grouped by row in the order of `rows`."""
    counts: IntArray | None = None
    """`[R]`: number of tokens in each row; None if all have one."""
    draft_counts: IntArray | None = None
    """`[R]`: number of drafts that each row verified; None for none."""
    failures: tuple[RowFailure, ...] = ()
    timings: StepTimings
    completed_copies: Int32Array
    scores: Scores | None = None
    """None: no row needs log-probabilities."""
    embeddings: tuple[RowEmbedding, ...] = ()
