"""Jobs for a worker's disk, which are not part of plans. The fields match plan.proto."""

import enum
from dataclasses import dataclass
from typing import NamedTuple


class DiskAction(enum.Enum):
    """Action of a job. The names match DiskAction in the plan protocol."""

    WRITE = enum.auto()
    """Copy host blocks to slots."""
    READ = enum.auto()
    """Copy slots to host blocks."""
    CLEAR = enum.auto()
    """Delete the content of all slots."""


class DiskBlock(NamedTuple):
    """A block on disk."""

    slot: int
    key: bytes
    """Key of the block."""
    root: bytes
    """Key before the first block of its sequence."""
    is_first: bool
    """Whether the block begins a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskJob:
    """One job. The worker reports its end."""

    copy_id: int
    action: DiskAction
    host_blocks: tuple[int, ...] = ()
    """One per block."""
    blocks: tuple[DiskBlock, ...] = ()
