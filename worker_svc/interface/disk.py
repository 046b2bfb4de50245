"""Copies between host memory and disk: the scheduler's jobs, and the worker's reports."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from worker_svc.interface.arrays import NO_IDS, Int32Array


class DiskAction(enum.Enum):
    """Action of a job."""

    WRITE = enum.auto()
    """Copy host blocks to slots."""
    READ = enum.auto()
    """Copy slots to host blocks."""
    CLEAR = enum.auto()
    """Delete all files."""


@dataclass(frozen=True, slots=True)
class DiskBlock:
    """A block on disk."""

    slot: int
    """Number of its file."""
    key: bytes
    """Key of the block, which identifies all tokens up to its end."""
    root: bytes
    """Key before the first block of its sequence, which identifies the model and the cache scope."""
    is_first: bool
    """Whether the block begins a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskJob:
    """One job of the scheduler; the reply is a `DiskReport` with the same ID."""

    copy_id: int
    action: DiskAction
    host_blocks: Int32Array = field(default_factory=lambda: NO_IDS)
    """One per block."""
    blocks: tuple[DiskBlock, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReport:
    """Result of a job, or a part of the list of blocks on disk."""

    copy_id: int = 0
    """0 if the report is not about a job."""
    failed: tuple[int, ...] = ()
    """Positions of the job's blocks that were not copied."""
    duration_ns: int = 0
    found: tuple[DiskBlock, ...] = ()
    """Blocks that are on disk from earlier sessions."""
    is_complete: bool = False
    """Whether this report ends the list of blocks on disk."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Files that were refused since the last report, by reason."""
