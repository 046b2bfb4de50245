"""Values in a recording: the core's own events, digests of plans, and reports from workers and front ends."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.plan import BlockCopy, Plan
from scheduler_svc.core.interface.records import Note, Peer, QueueNote
from scheduler_svc.recorder.tape import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyDigest:
    """Blocks that a plan copies between device and host."""

    copy_id: int
    sources: list[int]
    targets: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDigest:
    """Admission of a request to a row, without the tokens."""

    row: int
    generation: int
    frontend: Peer
    stream: int
    num_tokens: int
    """All known tokens of the request."""
    num_computed_tokens: int
    """Number of these tokens whose KV already exists, or is copied by the plan."""
    attempt: int
    """Number of earlier attempts to run the request."""
    blocks: list[int]
    checkpoint: int | None = None
    """Checkpoint that the row's recurrent state is restored from."""
    window_tables: list[int] = field(default_factory=list)
    """Block tables of the KV groups with a window, one after the other."""
    window_first: int = 0
    """Position of their first entry."""
    window_period: int = 0
    """Period with which they repeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDigest:
    """All columns of a plan, without token ids."""

    worker: Peer
    epoch: int
    step: int
    num_decodes: int
    num_tokens: int
    """Number of tokens that the step computes, without drafts: one per decode row, plus the chunks."""
    leaves: list[int]
    admissions: list[AdmissionDigest]
    append_rows: list[int]
    append_blocks: list[int]
    append_windows: list[int]
    """Their blocks in the KV groups with a window, position by position; -1 for the block of a period earlier.
    Empty if all are -1.
    """
    chunk_rows: list[int]
    chunk_lengths: list[int]
    holds: list[int]
    """Rows that are paused (held out) from this step on."""
    releases: list[int]
    swap_outs: list[CopyDigest]
    swap_ins: list[CopyDigest]
    copy_sources: list[int]
    copy_targets: list[int]
    draft_rows: list[int]
    """Rows whose draft limit changes with this step."""
    draft_limits: list[int]
    save_rows: list[int]
    """Rows whose recurrent state is saved."""
    save_lengths: list[int]
    save_checkpoints: list[int]
    kept_checkpoints: list[int]
    """Checkpoints whose state is copied to host memory."""
    kept_places: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """A worker's own timings for a step, on the wall clock of its machine."""

    received_unix_us: int
    """When the worker received the plan, microseconds since 1970."""
    started_unix_us: int
    """When the forward pass began, microseconds since 1970."""
    prepare_us: int
    forward_us: int
    sample_us: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAsked:
    """The core was asked for a plan."""

    worker: Peer
    plan: PlanDigest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendReported:
    """A front end's report of a finished call, serialized."""

    frontend: Peer
    report: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskJobSent:
    """The core ordered a job for a worker's disk."""

    worker: Peer
    copy_id: int
    reads: bool
    """Whether blocks are read from disk. Otherwise they are written, or all are deleted if `num_blocks` is 0."""
    num_blocks: int


What = ev.Event | PlanAsked | ef.RequestEnded | ef.WorkerWelcomed | DiskJobSent | Note | QueueNote | FrontendReported


@dataclass(slots=True)
class Entry:
    """One entry of a record, in order."""

    index: int
    """Position in one core's record, from 0; each segment continues the count."""
    time: float
    """Core time, s."""
    what: What | None
    """An event, a request for a plan, a result or a report. None if the entry has only facts."""
    facts: Facts | None = None
    timings: Timings | None = None
    """The worker's timings if `what` is a StepDone; otherwise None."""


def digest(plan: Plan) -> PlanDigest:
    """Return the columns of a plan without its token ids."""
    return PlanDigest(
        worker=plan.worker,
        epoch=plan.epoch,
        step=plan.step,
        num_decodes=plan.num_decodes,
        num_tokens=plan.num_tokens,
        leaves=plan.leaves.tolist(),
        admissions=[
            AdmissionDigest(
                row=admission.row,
                generation=admission.generation,
                frontend=admission.frontend,
                stream=admission.stream,
                num_tokens=len(admission.token_ids),
                num_computed_tokens=admission.num_computed_tokens,
                attempt=admission.attempt,
                blocks=admission.blocks.tolist(),
                checkpoint=admission.checkpoint,
                window_tables=[] if admission.windows is None else admission.windows.tables.ravel().tolist(),
                window_first=0 if admission.windows is None else admission.windows.first,
                window_period=0 if admission.windows is None else admission.windows.period,
            )
            for admission in plan.admissions
        ],
        append_rows=plan.append_rows.tolist(),
        append_blocks=plan.append_blocks.tolist(),
        append_windows=plan.append_windows.ravel().tolist(),
        chunk_rows=plan.chunk_rows.tolist(),
        chunk_lengths=plan.chunk_lengths.tolist(),
        holds=plan.holds.tolist(),
        releases=plan.releases.tolist(),
        swap_outs=_copies(plan.swap_outs),
        swap_ins=_copies(plan.swap_ins),
        copy_sources=_list(plan.copy_sources),
        copy_targets=_list(plan.copy_targets),
        draft_rows=_list(plan.draft_rows),
        draft_limits=_list(plan.draft_limits),
        save_rows=_list(plan.save_rows),
        save_lengths=_list(plan.save_lengths),
        save_checkpoints=_list(plan.save_checkpoints),
        kept_checkpoints=_list(plan.kept_checkpoints),
        kept_places=_list(plan.kept_places),
    )


def _copies(copies: Sequence[BlockCopy]) -> list[CopyDigest]:
    return [CopyDigest(copy_id=c.copy_id, sources=_list(c.sources), targets=_list(c.targets)) for c in copies]


def _list(values: IndexArray) -> list[int]:
    found: list[int] = values.tolist()
    return found
