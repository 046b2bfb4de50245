"""Converts values of the worker to protobuf messages for the scheduler."""

from collections.abc import Iterator, Sequence

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.frames import PLAN_MAX_MESSAGE, PLAN_VERSIONS
from worker_svc.interface.disk import DiskReport
from worker_svc.interface.grammar import GrammarFailureCause, GrammarReport
from worker_svc.interface.result import (
    DeviceReadings,
    FailureKind,
    RowEmbedding,
    RowFailure,
    Scores,
    StepResult,
    StepTimings,
)
from worker_svc.link.identity import Identity
from worker_svc.link.session import HelloReason
from worker_svc.rows.retained import Retained

_RETAINED_OVERHEAD = 32
_KINDS = {kind: plan_pb2.RowFailureKind.Value(f"ROW_FAILURE_KIND_{kind.name}") for kind in FailureKind}
_CAUSES = {
    cause: plan_pb2.GrammarFailureCause.Value(f"GRAMMAR_FAILURE_CAUSE_{cause.name}") for cause in GrammarFailureCause
}
_REASONS = {reason: plan_pb2.HelloReason.Value(f"HELLO_REASON_{reason.name}") for reason in HelloReason}


def encode_hello(
    identity: Identity, incarnation: int, reason: HelloReason, retained: Sequence[Retained] = ()
) -> plan_pb2.Hello:
    """Return the first message of an incarnation, with as many of the retained sequences as fit into a frame."""
    limits = identity.limits
    return plan_pb2.Hello(
        protocol_version=PLAN_VERSIONS.oldest,
        newest_protocol_version=PLAN_VERSIONS.newest,
        worker_id=identity.worker_id,
        incarnation=incarnation,
        model=plan_pb2.ModelInfo(
            name=identity.model,
            architecture=identity.architecture,
            fingerprint=identity.fingerprint,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            dtype=identity.dtype,
            eos_token_ids=identity.eos_token_ids,
            hidden_size=limits.hidden_size,
            break_even_context=identity.break_even_context,
            state_bytes=limits.state_bytes,
        ),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_host_blocks=limits.num_host_blocks,
        num_disk_blocks=limits.num_disk_blocks,
        block_bytes=limits.block_bytes,
        cache_kinds=limits.cache_kinds,
        num_checkpoints=limits.num_checkpoints,
        num_host_states=limits.num_host_states,
        max_rows=limits.max_rows,
        max_tokens_per_step=limits.max_tokens_per_step,
        num_kv_groups=limits.num_kv_groups,
        window=limits.window,
        window_chunk=limits.window_chunk,
        max_draft_tokens=limits.max_draft_tokens,
        device=identity.device,
        pid=identity.pid,
        process=identity.process,
        reason=_REASONS[reason],
        retained=_retained(retained),
    )


def _retained(sequences: Sequence[Retained]) -> Iterator[plan_pb2.RetainedSequence]:
    room = PLAN_MAX_MESSAGE // 2
    for each in sequences:
        room -= len(each.prefix_root) + 4 * (len(each.token_ids) + len(each.blocks)) + _RETAINED_OVERHEAD
        if room < 0:
            return
        yield plan_pb2.RetainedSequence(
            prefix_root=each.prefix_root,
            token_ids=to_column(each.token_ids),
            blocks=to_column(each.blocks),
            is_proven=each.is_proven,
        )


def encode_result(result: StepResult) -> plan_pb2.StepResult:
    """Return the message for a step's result."""
    message = plan_pb2.StepResult(
        step=result.step,
        rows=to_column(result.rows),
        tokens=to_column(result.tokens),
        timings=_timings(result.timings),
        completed_copies=to_column(result.completed_copies),
    )
    if result.counts is not None:
        message.counts = to_column(result.counts)
    if result.draft_counts is not None:
        message.draft_counts = to_column(result.draft_counts)
    if result.failures:
        message.failures.extend(map(_failure, result.failures))
    if result.scores is not None:
        message.scores.extend(encode_scores(result.scores))
    if result.embeddings:
        message.embeddings.extend(map(_embedding, result.embeddings))
    return message


def encode_scores(scores: Scores) -> Iterator[plan_pb2.RowScores]:
    """Yield a message per section; the core forwards its content to the front end without parsing."""
    lines = scores.lines.astype("<i4", copy=False)
    most = (lines.shape[1] - 2) // 2
    sections = zip(
        scores.rows,
        scores.generations,
        scores.prompt_indices,
        scores.counts,
        scores.firsts,
        scores.num_tokens,
        strict=True,
    )
    for row, generation, prompt_index, count, first, num_tokens in sections:
        section = lines[first : first + num_tokens]
        content = plan_pb2.TokenScores(
            ranks=section[:, 0].tobytes(),
            top_token_ids=section[:, 1 : 1 + count].tobytes(),
            logprobs=section[:, 1 + most].tobytes(),
            top_logprobs=section[:, 2 + most : 2 + most + count].tobytes(),
        )
        yield plan_pb2.RowScores(
            row=row, generation=generation, prompt_index=prompt_index, scores=content.SerializeToString()
        )


def encode_grammar_report(report: GrammarReport) -> plan_pb2.GrammarReport:
    cause = plan_pb2.GRAMMAR_FAILURE_CAUSE_UNSPECIFIED if report.cause is None else _CAUSES[report.cause]
    return plan_pb2.GrammarReport(key=report.key, failure=report.failure, cause=cause)


def encode_disk_report(report: DiskReport) -> plan_pb2.DiskReport:
    message = plan_pb2.DiskReport(
        copy_id=report.copy_id,
        failed=to_column(list(report.failed)),
        duration_ns=report.duration_ns,
        is_complete=report.is_complete,
    )
    if report.found:
        message.found.slots = to_column([block.slot for block in report.found])
        message.found.keys = b"".join(block.key for block in report.found)
        message.found.roots = b"".join(block.root for block in report.found)
        message.found.is_first = bytes(block.is_first for block in report.found)
    for reason, count in report.refused.items():
        message.refused.add(reason=reason, count=count)
    return message


def _failure(failure: RowFailure) -> plan_pb2.RowFailure:
    return plan_pb2.RowFailure(
        row=failure.row,
        generation=failure.generation,
        reason=failure.reason,
        kind=_KINDS[failure.kind],
        field=failure.field,
    )


def _embedding(embedding: RowEmbedding) -> plan_pb2.RowEmbedding:
    values = embedding.values.astype("<f4", copy=False).tobytes()
    return plan_pb2.RowEmbedding(row=embedding.row, generation=embedding.generation, values=values)


def _timings(timings: StepTimings) -> plan_pb2.StepTimings:
    return plan_pb2.StepTimings(
        energy_uj=timings.energy_uj,
        idle_energy_uj=timings.idle_energy_uj,
        device=None if timings.device is None else _readings(timings.device),
        received_unix_ns=timings.received_unix_ns,
        started_unix_ns=timings.started_unix_ns,
        prepare_ns=timings.prepare_ns,
        forward_ns=timings.forward_ns,
        sample_ns=timings.sample_ns,
        idle_before_ns=timings.idle_before_ns,
        num_tokens=timings.num_tokens,
        copied_blocks=timings.copied_blocks,
        copy_ns=timings.copy_ns,
        copy_delay_ns=timings.copy_delay_ns if timings.copied_blocks or timings.copy_delay_ns else None,
    )


def _readings(readings: DeviceReadings) -> plan_pb2.DeviceReadings:
    return plan_pb2.DeviceReadings(
        utilisation=readings.utilisation,
        memory_used=readings.memory_used,
        memory_total=readings.memory_total,
        power=readings.power_w,
        processor_clock=readings.processor_clock_hz,
        memory_clock=readings.memory_clock_hz,
    )
