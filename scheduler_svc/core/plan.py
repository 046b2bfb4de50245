"""A plan: one step of work for one worker, as differences. The values of `quire.plan.v1.Plan`, before encoding."""

from dataclasses import dataclass, field

from scheduler_svc.core.arrays import NO_INDICES, IndexArray, Int32Array
from scheduler_svc.core.records import Peer, Pooling
from scheduler_svc.core.swapping import BlockCopy


@dataclass(slots=True, kw_only=True)
class RowAdmission:
    """A request takes a row."""

    row: int
    generation: int
    token_ids: Int32Array
    """All known tokens, `[n]`."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose KV is in the given blocks already, or is copied there by this plan."""
    blocks: IndexArray
    """Block table of KV group 0."""
    sampling: bytes
    grammar: bytes
    pooling: Pooling = Pooling.NONE
    request_id: str
    frontend: Peer
    stream: int
    traceparent: str
    """Of the request; "" when it is not traced."""
    attempt: int
    """How often the request was placed before."""
    queued_since: float
    """Core time from which it waited for this placement."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """One step; every column as in plan.proto."""

    worker: Peer
    epoch: int
    step: int
    leaves: IndexArray
    admissions: tuple[RowAdmission, ...]
    append_rows: IndexArray
    append_blocks: IndexArray
    chunk_rows: IndexArray
    chunk_lengths: IndexArray
    holds: IndexArray
    releases: IndexArray
    swap_outs: tuple[BlockCopy, ...] = ()
    """Device to host, before anything else touches the blocks."""
    copy_sources: IndexArray = field(default_factory=lambda: NO_INDICES)
    copy_targets: IndexArray = field(default_factory=lambda: NO_INDICES)
    """Device to device, after the swap-outs and before anything else touches the targets."""
    swap_ins: tuple[BlockCopy, ...] = ()
    """Host to device, before the forward pass."""
    num_decodes: int
    """Decode rows that take part."""
    num_tokens: int
    """Tokens computed."""
    traced_rows: tuple[tuple[Peer, int], ...]
    """(front end, stream) of the traced requests that take part."""
