"""Codec for frames between the scheduler and workers: converts bytes to events and plans to bytes.

A frame that cannot be parsed, or whose columns differ in length, raises `MalformedFrameError`. The service counts these
errors; the core handles the events.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

import numpy as np
from google.protobuf.message import DecodeError

from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import NO_INDICES
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.memory.swapping import joined
from shared.columns import MalformedColumnError, from_column, from_columns, to_column
from shared.frames import (
    MAX_SEQUENCE,
    MAX_VOCABULARY,
    PLAN_MAX_MESSAGE,
    PLAN_VERSIONS,
    TOKEN_BYTES,
    FrameTooLargeError,
    MalformedFrameError,
)
from shared.kv_sizes import MAX_DISK_BLOCKS, MAX_WINDOW_ENTRIES
from shared.prefix_keys import KEY_BYTES, root_key
from shared.versions import UnsupportedVersionError, negotiate, spoken

_MAX_ROWS = 1 << 16
_MAX_BLOCKS = 1 << 22
_MAX_BLOCK_SIZE = 1 << 16
_MAX_HIDDEN = 1 << 20
_MAX_DRAFTS = 64
"""Maximum draft tokens per row and step."""
_MAX_GROUPS = 64
"""Maximum number of KV groups."""
_MAX_KINDS, _MAX_KIND = 8, 16
"""Maximum number of kinds of cache, and maximum length of each in characters. They are only displayed."""
_MAX_DEVICE = 128
"""Maximum length of a device name in characters. The name is only displayed."""
_MAX_FIELD = 128
"""Maximum length of a field name in characters."""
_MAX_REASON, _MAX_REASONS = 32, 16
"""Maximum length of a reason for refused files in characters, and number of reasons in a report."""
_MAX_TABLE = 1 << 28
"""Maximum number of entries in a worker's block tables. Unused entries take address space but no memory."""
_HELLO_REASONS = {
    plan_pb2.HELLO_REASON_SESSION_LOST: ev.HelloReason.SESSION_LOST,
    plan_pb2.HELLO_REASON_PROTOCOL_ERROR: ev.HelloReason.PROTOCOL_ERROR,
    plan_pb2.HELLO_REASON_STEP_FAILED: ev.HelloReason.STEP_FAILED,
}
_DISK_ACTIONS = {action: plan_pb2.DiskAction.Value(f"DISK_ACTION_{action.name}") for action in DiskAction}
_FAILURE_KINDS = {
    plan_pb2.ROW_FAILURE_KIND_NOT_FINITE: ev.FailureKind.NOT_FINITE,
    plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED: ev.FailureKind.NO_TOKEN_ALLOWED,
    plan_pb2.ROW_FAILURE_KIND_GRAMMAR_TOO_COSTLY: ev.FailureKind.GRAMMAR_TOO_COSTLY,
    plan_pb2.ROW_FAILURE_KIND_INTERNAL: ev.FailureKind.INTERNAL,
}


def decode(peer: ev.Peer, payload: bytes) -> tuple[ev.Event, plan_pb2.StepTimings | None]:
    """Decode a worker's frame into an event, with the timings if it is a step result.

    Raises:
        MalformedFrameError: the frame is malformed.
        UnsupportedVersionError: the Hello has no common protocol version, or the worker's limits are not supported.
    """
    try:
        message = plan_pb2.WorkerMessage.FromString(payload)
    except DecodeError as error:
        raise MalformedFrameError(str(error)) from None
    body = message.WhichOneof("body")
    if body == "result":
        return _step_done(peer, message.epoch, message.result)
    match body:
        case "hello":
            return _hello(peer, message.hello), None
        case "compiling":
            expected_s = message.compiling.expected_ms / 1000
            return ev.WorkerCompiling(worker=peer, epoch=message.epoch, expected_s=expected_s), None
        case "grammar":
            report = message.grammar
            failure = _grammar_failure(report)
            return ev.GrammarReported(worker=peer, epoch=message.epoch, key=report.key, failure=failure), None
        case "disk":
            return _disk_reported(peer, message.epoch, message.disk), None
        case "goodbye":
            return ev.WorkerLost(worker=peer, reason=f"goodbye: {message.goodbye.reason}", orderly=True), None
        case _:
            raise MalformedFrameError("the message has no body")


def encode_plan(
    plan: Plan,
    *,
    step_traceparent: str,
    attempt_traceparents: dict[tuple[bytes, int], str],
    fingerprint: str | None = None,
) -> bytes:
    """Encode a plan.

    Args:
        plan: the plan.
        step_traceparent: the traceparent of the step.
        attempt_traceparents: the traceparents by (front end, stream).
        fingerprint: the model's fingerprint for keys of prefixes; None if the worker does not share prefixes.

    Raises:
        FrameTooLargeError: the frame exceeds the limit. Admission bounds the size of plans, so this is a bug.
    """
    frame = plan_pb2.SchedulerMessage(epoch=plan.epoch)
    # Fill the submessage in place, because adding a finished message copies it.
    message = frame.plan
    message.step = plan.step
    message.traceparent = step_traceparent
    for admission in plan.admissions:
        traceparent = attempt_traceparents.get((admission.frontend, admission.stream), "")
        _encode_admission(message.admissions.add(), admission, traceparent, fingerprint)
    # Set only columns with content, because an unset field costs nothing and most columns are empty.
    if len(plan.leaves):
        message.leaves = to_column(plan.leaves)
    if len(plan.append_rows):
        message.append_rows, message.append_blocks = to_column(plan.append_rows), to_column(plan.append_blocks)
        if len(plan.append_windows):
            message.append_windows = to_column(plan.append_windows.ravel())
    if len(plan.chunk_rows):
        message.chunk_rows, message.chunk_lengths = to_column(plan.chunk_rows), to_column(plan.chunk_lengths)
    if len(plan.holds):
        message.holds = to_column(plan.holds)
    if len(plan.releases):
        message.releases = to_column(plan.releases)
    if len(plan.copy_sources):
        message.copy_sources, message.copy_targets = to_column(plan.copy_sources), to_column(plan.copy_targets)
    if len(plan.draft_rows):
        message.draft_rows, message.draft_limits = to_column(plan.draft_rows), to_column(plan.draft_limits)
    if len(plan.save_rows):
        message.save_rows, message.save_lengths = to_column(plan.save_rows), to_column(plan.save_lengths)
        message.save_checkpoints = to_column(plan.save_checkpoints)
    if len(plan.kept_checkpoints):
        message.kept_checkpoints, message.kept_places = to_column(plan.kept_checkpoints), to_column(plan.kept_places)
    if plan.swap_outs or plan.swap_ins:
        message.swap_out_blocks, message.swap_out_host_blocks = map(to_column, joined(plan.swap_outs))
        message.swap_in_host_blocks, message.swap_in_blocks = map(to_column, joined(plan.swap_ins))
        message.copy_ids = to_column([copy.copy_id for copy in plan.swap_outs + plan.swap_ins])
    encoded = frame.SerializeToString()
    if len(encoded) > PLAN_MAX_MESSAGE:
        raise FrameTooLargeError(_too_large(message, len(encoded)))
    return encoded


def encode_welcome(epoch: int, *, max_in_flight: int, silence_s: float, version: int, leader_number: int = 0) -> bytes:
    """Encode Welcome, which opens an epoch with `version` of the protocol."""
    welcome = plan_pb2.Welcome(
        max_in_flight=max_in_flight,
        silence_ms=int(silence_s * 1000),
        protocol_version=version,
        leader_number=leader_number,
    )
    return plan_pb2.SchedulerMessage(epoch=epoch, welcome=welcome).SerializeToString()


def encode_refused(reason: str) -> bytes:
    """Encode Refused, after which the worker exits."""
    return plan_pb2.SchedulerMessage(refused=plan_pb2.Refused(reason=reason)).SerializeToString()


def encode_prepare_grammar(epoch: int, *, key: bytes, grammar: bytes, drop: Sequence[bytes]) -> bytes:
    """Encode the request to compile a grammar, and to drop those with the keys in `drop`."""
    prepare = plan_pb2.PrepareGrammar(key=key, grammar=grammar, drop=drop)
    return plan_pb2.SchedulerMessage(epoch=epoch, prepare_grammar=prepare).SerializeToString()


def encode_disk_job(epoch: int, job: DiskJob) -> bytes:
    """Encode a job for the worker's disk."""
    message = plan_pb2.DiskJob(copy_id=job.copy_id, action=_DISK_ACTIONS[job.action])
    if job.blocks:
        message.host_blocks = to_column(list(job.host_blocks))
        message.blocks.slots = to_column([block.slot for block in job.blocks])
        message.blocks.keys = b"".join(block.key for block in job.blocks)
        message.blocks.roots = b"".join(block.root for block in job.blocks)
        message.blocks.is_first = bytes(block.is_first for block in job.blocks)
    return plan_pb2.SchedulerMessage(epoch=epoch, disk_job=message).SerializeToString()


def encode_ping(epoch: int, log_level: str) -> bytes:
    """Encode a ping, the heartbeat of an epoch; with the log level for the worker, if not empty."""
    return plan_pb2.SchedulerMessage(epoch=epoch, ping=plan_pb2.Ping(log_level=log_level)).SerializeToString()


UNKNOWN = plan_pb2.SchedulerMessage(unknown=plan_pb2.Unknown()).SerializeToString()
"""Encoded Unknown, which makes the receiver send a new Hello."""


def _too_large(plan: plan_pb2.Plan, size: int) -> str:
    """Return the message for a plan that exceeds a frame."""
    heaviest = max(plan.admissions, key=lambda admission: admission.ByteSize(), default=None)
    request = "" if heaviest is None else f": request {heaviest.request_id} has {heaviest.ByteSize()} of them"
    return f"plan {plan.step}: {size} bytes exceed the limit of {PLAN_MAX_MESSAGE} bytes per frame{request}"


def _encode_admission(
    message: plan_pb2.Admission, admission: RowAdmission, traceparent: str, fingerprint: str | None
) -> None:
    spec = admission.spec
    message.row = admission.row
    message.generation = admission.generation
    message.token_ids = to_column(admission.token_ids)
    message.num_prompt_tokens = spec.num_prompt_tokens
    message.num_computed_tokens = admission.num_computed_tokens
    message.block_tables.append(to_column(admission.blocks))
    if admission.windows is not None:
        message.block_tables.extend(map(to_column, admission.windows.tables))
        message.window_first, message.window_period = admission.windows.first, admission.windows.period
    message.sampling = spec.sampling
    message.grammar = spec.grammar
    message.pooling = plan_pb2.Pooling.ValueType(spec.pooling)
    message.request_id = spec.request_id
    message.traceparent = traceparent
    if admission.checkpoint is not None:
        message.checkpoint = admission.checkpoint
    if fingerprint is not None:
        message.prefix_root = root_key(fingerprint, spec.cache_scope)


def _step_done(peer: ev.Peer, epoch: int, result: plan_pb2.StepResult) -> tuple[ev.StepDone, plan_pb2.StepTimings]:
    # Read each field once, because every access costs a lookup.
    step, row_column, token_column, count_column, draft_column, copy_column, failures, scores, embeddings, timings = (
        _RESULT_OF(result)
    )
    counts = draft_counts = None
    try:
        if count_column:
            rows, counts = from_columns(row_column, count_column)
            tokens = from_column(token_column)
            if int(counts.sum()) != len(tokens):
                raise MalformedFrameError(
                    f"counts: their sum is {int(counts.sum())}, but {len(tokens)} tokens were sent"
                )
        else:
            rows, tokens = from_columns(row_column, token_column)
        if draft_column:
            _, draft_counts = from_columns(row_column, draft_column)
        completed_copies = from_column(copy_column).tolist() if copy_column else ()
    except MalformedColumnError as error:
        raise MalformedFrameError(str(error)) from None
    copied_blocks, copy_ns, delay_ns, idle_ns, energy_uj = _COPIES_OF(timings)
    if copied_blocks and not timings.HasField("copy_delay_ns"):
        delay_ns = copy_ns
    event = ev.StepDone(
        worker=peer,
        epoch=epoch,
        step=step,
        rows=rows,
        tokens=tokens,
        counts=counts,
        draft_counts=draft_counts,
        failures=[_failed_row(failure) for failure in failures] if failures else (),
        scores=[
            ev.RowScores(row=s.row, generation=s.generation, prompt_index=s.prompt_index, scores=s.scores)
            for s in scores
        ]
        if scores
        else (),
        embeddings=[
            ev.RowEmbedding(row=each.row, generation=each.generation, values=each.values) for each in embeddings
        ]
        if embeddings
        else (),
        completed_copies=completed_copies,
        copied_blocks=copied_blocks,
        copy_s=copy_ns / 1e9,
        copy_delay_s=delay_ns / 1e9,
        idle_s=idle_ns / 1e9,
        energy_j=energy_uj / 1e6,
    )
    return event, timings


_RESULT_OF = attrgetter(
    "step",
    "rows",
    "tokens",
    "counts",
    "draft_counts",
    "completed_copies",
    "failures",
    "scores",
    "embeddings",
    "timings",
)
_COPIES_OF = attrgetter("copied_blocks", "copy_ns", "copy_delay_ns", "idle_before_ns", "energy_uj")


def _failed_row(failure: plan_pb2.RowFailure) -> ev.FailedRow:
    return ev.FailedRow(
        row=failure.row,
        generation=failure.generation,
        # An unknown kind is treated like the most severe one.
        kind=_FAILURE_KINDS.get(failure.kind, ev.FailureKind.NOT_FINITE),
        reason=failure.reason[:500],
        field=failure.field[:_MAX_FIELD],
    )


def _disk_reported(peer: ev.Peer, epoch: int, report: plan_pb2.DiskReport) -> ev.DiskReported:
    found = report.found
    try:
        slots, failed = from_column(found.slots).tolist(), from_column(report.failed).tolist()
    except MalformedColumnError as error:
        raise MalformedFrameError(str(error)) from None
    sizes = (len(found.keys), len(found.roots), len(found.is_first))
    if sizes != (KEY_BYTES * len(slots), KEY_BYTES * len(slots), len(slots)) or min(slots + failed, default=0) < 0:
        raise MalformedFrameError("DiskReport: the columns differ in length, or a number is negative")
    return ev.DiskReported(
        worker=peer,
        epoch=epoch,
        copy_id=report.copy_id,
        failed=tuple(failed),
        seconds=report.duration_ns / 1e9,
        found=tuple(
            DiskBlock(
                slot,
                found.keys[KEY_BYTES * place : KEY_BYTES * (place + 1)],
                found.roots[KEY_BYTES * place : KEY_BYTES * (place + 1)],
                bool(found.is_first[place]),
            )
            for place, slot in enumerate(slots)
        ),
        is_complete=report.is_complete,
        refused=tuple((each.reason[:_MAX_REASON], each.count) for each in report.refused[:_MAX_REASONS]),
    )


def _grammar_failure(report: plan_pb2.GrammarReport) -> ev.GrammarFailure | None:
    if not report.failure and report.cause == plan_pb2.GRAMMAR_FAILURE_CAUSE_UNSPECIFIED:
        return None
    # A worker of an earlier release does not send the cause, so other workers may try the grammar.
    is_invalid = report.cause == plan_pb2.GRAMMAR_FAILURE_CAUSE_GRAMMAR
    return ev.GrammarFailure(" ".join(report.failure.split())[:500] or "no reason given", is_invalid)


def _hello(peer: ev.Peer, hello: plan_pb2.Hello) -> ev.WorkerHello:
    theirs = spoken(hello.protocol_version, hello.newest_protocol_version)
    version = negotiate("plan", scheduler=PLAN_VERSIONS, peer=theirs, role="worker")
    model = hello.model
    if not (
        0 < len(hello.worker_id.encode()) <= 64
        and hello.max_rows <= _MAX_ROWS
        and hello.num_blocks <= _MAX_BLOCKS
        and hello.block_size <= _MAX_BLOCK_SIZE
        and model.max_model_len <= MAX_SEQUENCE
        and model.vocab_size <= MAX_VOCABULARY
        and model.hidden_size <= _MAX_HIDDEN
        and hello.max_draft_tokens <= _MAX_DRAFTS
        and 1 <= hello.num_kv_groups <= _MAX_GROUPS
        and hello.num_blocks * (hello.num_kv_groups - 1) <= MAX_WINDOW_ENTRIES
        and (hello.num_kv_groups == 1) == (not hello.window) == (not hello.window_chunk)
        and max(hello.window, hello.window_chunk) <= MAX_SEQUENCE
    ):
        raise MalformedFrameError(
            "Hello: worker_id, max_rows, num_blocks, block_size, max_draft_tokens, KV groups or model is out of range"
        )
    longest = min(hello.num_blocks, -(-model.max_model_len // max(hello.block_size, 1)))
    if hello.max_rows * longest > _MAX_TABLE:
        raise UnsupportedVersionError(
            f"max_num_seqs ({hello.max_rows}) sequences of max_model_len ({model.max_model_len}) need more than"
            f" {_MAX_TABLE} block-table entries; lower one of them, or raise block_size"
        )
    return ev.WorkerHello(
        worker=peer,
        worker_id=hello.worker_id,
        model=ev.ModelFacts(
            name=model.name,
            architecture=model.architecture,
            fingerprint=model.fingerprint,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            eos_token_ids=tuple(model.eos_token_ids),
            hidden_size=model.hidden_size,
            break_even_context=model.break_even_context,
            state_bytes=model.state_bytes,
        ),
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        max_rows=hello.max_rows,
        max_tokens_per_step=hello.max_tokens_per_step,
        num_host_blocks=min(hello.num_host_blocks, _MAX_BLOCKS),
        num_disk_blocks=min(hello.num_disk_blocks, MAX_DISK_BLOCKS),
        block_bytes=hello.block_bytes,
        cache_kinds=tuple(kind[:_MAX_KIND] for kind in hello.cache_kinds[:_MAX_KINDS]),
        num_checkpoints=min(hello.num_checkpoints, _MAX_BLOCKS),
        num_host_states=min(hello.num_host_states, _MAX_BLOCKS),
        max_draft_tokens=hello.max_draft_tokens,
        num_kv_groups=hello.num_kv_groups,
        window=hello.window,
        window_chunk=hello.window_chunk,
        device=" ".join(hello.device.split())[:_MAX_DEVICE],
        pid=hello.pid,
        process=hello.process,
        protocol_version=version,
        reason=_HELLO_REASONS.get(hello.reason, ev.HelloReason.STARTED),
        retained=tuple(_retained(hello)),
    )


def _retained(hello: plan_pb2.Hello) -> Iterator[ev.RetainedSequence]:
    """Yield the valid sequences; the others are computed again."""
    for each in hello.retained:
        num_tokens, rest = divmod(len(each.token_ids), TOKEN_BYTES)
        blocks = from_column(each.blocks).astype(np.intp) if len(each.blocks) % TOKEN_BYTES == 0 else NO_INDICES
        numbers = blocks.tolist()
        if (
            len(each.prefix_root) == KEY_BYTES
            and not rest
            and num_tokens
            and len(numbers) == -(-num_tokens // max(hello.block_size, 1))
            and min(numbers) >= 0
            and max(numbers) < hello.num_blocks
        ):
            yield ev.RetainedSequence(
                root=each.prefix_root, tokens=each.token_ids, blocks=blocks, is_proven=each.is_proven
            )
