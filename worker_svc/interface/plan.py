"""Plan: one step for this worker, as changes since the previous plan; plan.proto documents each field.

The link decodes a plan once and validates everything that depends only on the plan and the worker's limits: lengths,
ranges, duplicates. The row table validates everything that depends on the rows' state when it applies the plan.
"""

import enum
from dataclasses import dataclass

from worker_svc.interface.arrays import FloatArray, Int32Array, IntArray
from worker_svc.interface.grammar import Grammar

NO_LOGPROBS = -1
"""The row needs no log-probabilities; 0 means only the log-probability of the sampled token."""


class Pooling(enum.IntEnum):
    """Pools the last hidden states of a row's tokens into one vector."""

    NONE = 0
    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules that change the logits of a row: penalties, biases, allowed and forbidden tokens.

    Token IDs are in the vocabulary, penalties are finite, biases are not NaN.
    """

    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    bias_token_ids: Int32Array
    bias_values: FloatArray
    """As many as `bias_token_ids`."""
    allowed_token_ids: Int32Array
    """Empty: all."""
    banned_token_ids: Int32Array
    bad_words: tuple[tuple[int, ...], ...]
    """Sequences of at least two tokens."""
    min_tokens: int
    """Minimum number of output tokens, before which the row's stop tokens are forbidden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    seed: int
    """The 64 bits of the seed, as a signed number."""
    choice: int
    logprobs: int
    prompt_logprobs: int
    stop_token_ids: Int32Array
    rules: Rules | None
    """None: the logits stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Admission of a row."""

    row: int
    generation: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: tuple[Int32Array, ...]
    """One per KV group. Those of groups with a window begin at `window_first`, and repeat with `window_period`."""
    window_first: int = 0
    """Position of the first entry of tables for windows."""
    window_period: int = 0
    """Period of tables for windows after their end, positions."""
    checkpoint: int | None
    """Checkpoint with the recurrent state after `num_computed_tokens` tokens; None: the state begins empty."""
    sampling: SamplingParams
    sampling_fault: str
    """Why the sampling parameters are invalid, so that the row fails; empty if they are valid."""
    request_id: str
    traceparent: str
    grammar: Grammar | None
    pooling: Pooling
    prefix_root: bytes = b""
    """Key before the first block in the scheduler's prefix cache; empty if the KV must not be shared."""

    @property
    def needs_all_logits(self) -> bool:
        """Whether the row's tokens depend on more than each token's own logit and noise."""
        sampling = self.sampling
        truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1
        return (
            (sampling.temperature > 0 and truncated)
            or sampling.logprobs != NO_LOGPROBS
            or sampling.rules is not None
            or self.grammar is not None
            or bool(self.sampling_fault)
        )


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks to copy, `sources[i]` to `targets[i]`; not empty."""

    sources: Int32Array
    targets: Int32Array


@dataclass(frozen=True, slots=True)
class StateSaves:
    """Recurrent states to save; not empty. A row may occur several times, a checkpoint once."""

    rows: IntArray
    lengths: IntArray
    """Number of tokens of each state."""
    checkpoints: IntArray

    @property
    def columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """Rows, lengths and checkpoints."""
        return self.rows, self.lengths, self.checkpoints


@dataclass(frozen=True, slots=True)
class StateCopies:
    """Recurrent states to copy from checkpoints to places in host memory; not empty. The places are distinct."""

    checkpoints: IntArray
    places: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step of work. In every column except `append_rows`, the rows are distinct and in range."""

    step: int
    leaves: IntArray
    admissions: tuple[Admission, ...]
    append_rows: IntArray
    append_blocks: Int32Array
    append_windows: Int32Array
    """`[appends, groups with a window]`: blocks for the same positions; -1 for the block of a period earlier.
    Empty if all are.
    """
    chunk_rows: IntArray
    """Ascending."""
    chunk_lengths: IntArray
    holds: IntArray
    releases: IntArray
    traceparent: str
    swap_out: BlockCopies | None
    """From device to host, before the rest of the plan."""
    swap_in: BlockCopies | None
    """From host to device, before the forward pass."""
    block_copies: BlockCopies | None
    """On the device, before the plan writes any block."""
    copy_ids: Int32Array
    """IDs of the plan's swaps, which the result lists."""
    draft_rows: IntArray
    """Rows whose draft limit changes."""
    draft_limits: IntArray
    """Most draft tokens that each of `draft_rows` verifies per decode step, from this step on."""
    state_saves: StateSaves | None = None
    """Saves to checkpoints, before or within the forward pass."""
    host_saves: StateSaves | None = None
    """Saves of rows that leave to host memory, before the rest of the plan."""
    kept_states: StateCopies | None = None
    """Copies of checkpoints to host memory, before the rest of the plan."""
