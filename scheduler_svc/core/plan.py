"""A plan: one step of work for one worker, as differences. The values of `quire.plan.v1.Plan`, before encoding."""

from dataclasses import dataclass

from scheduler_svc.core.events import Int32Array, Peer
from scheduler_svc.core.swapping import BlockCopy


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAdmission:
    """A request takes a row."""

    row: int
    generation: int
    token_ids: Int32Array
    """All known tokens, `[n]`."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose KV is in the given blocks already."""
    blocks: Int32Array
    """Block table of KV group 0."""
    sampling: bytes
    request_id: str
    frontend: Peer
    stream: int
    traceparent: str
    """Of the request; "" when it is not traced."""
    attempt: int
    """How often the request was placed before."""
    queued_since: float
    """Core time from which it waited for this placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step; every column as in plan.proto."""

    worker: Peer
    epoch: int
    step: int
    leaves: Int32Array
    admissions: tuple[RowAdmission, ...]
    append_rows: Int32Array
    append_blocks: Int32Array
    chunk_rows: Int32Array
    chunk_lengths: Int32Array
    holds: Int32Array
    releases: Int32Array
    swap_outs: tuple[BlockCopy, ...] = ()
    """Device to host, before anything else touches the blocks."""
    swap_ins: tuple[BlockCopy, ...] = ()
    """Host to device, before the forward pass."""
    num_decodes: int
    """Decode rows that take part."""
    num_tokens: int
    """Tokens computed."""
    traced_rows: tuple[tuple[Peer, int], ...]
    """(front end, stream) of the traced requests that take part."""
