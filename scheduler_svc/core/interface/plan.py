"""Plan: one step for one worker, as deltas from the worker's previous step.

A plan has the same fields as `quire.plan.v1.Plan`. This module does not know the wire format.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.interface.arrays import NO_INDICES, IndexArray, Int32Array
from scheduler_svc.core.interface.records import Peer
from shared.request_spec import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Blocks to copy between device and host in one plan. The plan's field gives the direction."""

    copy_id: int
    sources: IndexArray
    targets: IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTables:
    """A row's block tables for layers with a sliding window, up to its present tokens."""

    first: int
    """Position of the first entry; earlier blocks of the sequence are out of reach."""
    period: int
    """A position after the end of a table reuses the block of a period earlier, unless a plan appends a new one."""
    tables: IndexArray
    """`[groups, positions]`: block of each position."""


@dataclass(slots=True, kw_only=True)
class RowAdmission:
    """Admission of a request to a row."""

    row: int
    generation: int
    spec: RequestSpec
    token_ids: Int32Array
    """All known tokens, `[n] int32`."""
    num_computed_tokens: int
    """Number of leading tokens whose KV is already in the given blocks, or is copied there by this plan."""
    num_restored_tokens: int = 0
    """Number of these tokens that were copied from host memory for this admission, or are copied by this plan."""
    num_loaded_tokens: int = 0
    """Number of these tokens that were read from disk before."""
    num_unusable_tokens: int = 0
    """Number of tokens after these whose KV is cached, but after which the row cannot begin."""
    blocks: IndexArray
    """Block table of the first KV group, `[num_blocks]`."""
    windows: WindowTables | None = None
    """Tables of the other groups; None if there are none."""
    checkpoint: int | None = None
    """Checkpoint that the row's recurrent state is restored from, before the forward pass."""
    frontend: Peer
    stream: int
    attempt: int
    """Number of earlier attempts to run the request."""
    queued_since: float
    """Core time at which the request began to wait for this attempt, s."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """One step. The columns match plan.proto."""

    worker: Peer
    epoch: int
    step: int
    leaves: IndexArray
    admissions: tuple[RowAdmission, ...]
    append_rows: IndexArray
    append_blocks: IndexArray
    append_windows: IndexArray = field(default_factory=lambda: NO_INDICES)
    """`[len(append_rows), tables]`: blocks for the same positions in tables for windows; -1 where the position uses the
    block of the position a period before. Empty if all do.
    """
    chunk_rows: IndexArray
    chunk_lengths: IndexArray
    holds: IndexArray
    releases: IndexArray
    swap_outs: tuple[BlockCopy, ...] = ()
    """Copies from device to host, before any other operation uses the blocks."""
    copy_sources: IndexArray = field(default_factory=lambda: NO_INDICES)
    copy_targets: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Targets of copies on the device, after the swap-outs and before any other operation uses the targets."""
    swap_ins: tuple[BlockCopy, ...] = ()
    """Copies from host to device, before the forward pass."""
    draft_rows: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Rows whose draft limit changes with this step."""
    draft_limits: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Their new draft limits."""
    save_rows: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Rows whose recurrent state is saved; a row may occur several times."""
    save_lengths: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Number of tokens of each saved state, from the row's computed tokens before this step to those after it."""
    save_checkpoints: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Checkpoints that the states are saved to; distinct."""
    kept_checkpoints: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Checkpoints whose state is copied to host memory, with the swap-outs."""
    kept_places: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Places in host memory that they are copied to; distinct, and different from those of `save_checkpoints`."""
    num_decodes: int
    """Number of decode rows in the step."""
    num_tokens: int
    """Number of tokens that the step computes, without draft tokens."""
    traced_rows: tuple[tuple[Peer, int], ...]
    """(front end, stream) of the traced requests in the step."""
