"""The links: simulated messages pass through the production codecs of the scheduler.

The other side of each link is implemented here, field by field from the protocol. So a codec error is not hidden by the
same error on the other side. Frames that the codecs refuse as malformed are passed to the core unchanged: the simulator
checks the core with them, and `tests/scheduler_svc` checks the codecs.

Front end hellos and operator calls are not covered.
"""

import dataclasses

import numpy as np

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob
from scheduler_svc.core.interface.plan import BlockCopy, Plan, RowAdmission, WindowTables
from scheduler_svc.core.interface.records import EndReason, Log, Peer
from scheduler_svc.frontend import link as frontend_link
from scheduler_svc.frontend.link import Incoming, Outgoing
from scheduler_svc.worker import link as worker_link
from shared.columns import from_column, to_column
from shared.frames import PLAN_VERSIONS, MalformedFrameError
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import read_spec

_PRECISION_S = 1e-6
"""Precision of times, which are sent in nanoseconds relative to the send time."""
_KINDS = {
    ev.FailureKind.NOT_FINITE: plan_pb2.ROW_FAILURE_KIND_NOT_FINITE,
    ev.FailureKind.NO_TOKEN_ALLOWED: plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED,
    ev.FailureKind.GRAMMAR_TOO_COSTLY: plan_pb2.ROW_FAILURE_KIND_GRAMMAR_TOO_COSTLY,
    ev.FailureKind.INTERNAL: plan_pb2.ROW_FAILURE_KIND_INTERNAL,
}
_REASONS = {
    ev.HelloReason.STARTED: plan_pb2.HELLO_REASON_STARTED,
    ev.HelloReason.SESSION_LOST: plan_pb2.HELLO_REASON_SESSION_LOST,
    ev.HelloReason.PROTOCOL_ERROR: plan_pb2.HELLO_REASON_PROTOCOL_ERROR,
    ev.HelloReason.STEP_FAILED: plan_pb2.HELLO_REASON_STEP_FAILED,
}


# ---------------------------------------------------------------- to the scheduler


def received(event: ev.Event, now: float) -> ev.Event:
    """Return the event as the scheduler decodes it, if it comes over a link."""
    match event:
        case ev.StepDone(step=step) if step < 0:
            return event  # The wire format cannot represent this number.
        case ev.StepDone() | ev.GrammarReported() | ev.DiskReported() | ev.WorkerHello():
            return _from_worker(event)
        case ev.RequestArrived() | ev.StopMatched() | ev.RequestCancelled() | ev.CreditGranted() | ev.ResumeAsked():
            return _from_frontend(event, now)
    return event


def _from_worker(event: ev.StepDone | ev.GrammarReported | ev.DiskReported | ev.WorkerHello) -> ev.Event:
    match event:
        case ev.StepDone():
            message = plan_pb2.WorkerMessage(epoch=event.epoch, result=_result(event))
        case ev.GrammarReported():
            message = plan_pb2.WorkerMessage(epoch=event.epoch, grammar=_report(event))
        case ev.DiskReported():
            message = plan_pb2.WorkerMessage(epoch=event.epoch, disk=_disk_report(event))
        case ev.WorkerHello():
            message = plan_pb2.WorkerMessage(hello=_hello(event))
    try:
        decoded, _ = worker_link.decode(event.worker, message.SerializeToString())
    except MalformedFrameError:
        return event
    if isinstance(decoded, ev.WorkerHello) and isinstance(event, ev.WorkerHello):
        decoded = dataclasses.replace(decoded, protocol_version=event.protocol_version)
    if isinstance(decoded, ev.DiskReported) and isinstance(event, ev.DiskReported):
        decoded = dataclasses.replace(decoded, seconds=event.seconds)
    if not isinstance(event, ev.StepDone) and decoded != event:
        raise ViolationError("wire.worker", f"{event} arrives as {decoded}")
    return decoded


def _result(event: ev.StepDone) -> plan_pb2.StepResult:
    result = plan_pb2.StepResult(step=event.step, rows=to_column(event.rows), tokens=to_column(event.tokens))
    if event.counts is not None:
        result.counts = to_column(event.counts)
    if event.draft_counts is not None:
        result.draft_counts = to_column(event.draft_counts)
    for failure in event.failures:
        result.failures.add(
            row=failure.row & 0xFFFFFFFF,
            generation=failure.generation,
            kind=_KINDS[failure.kind],
            reason=failure.reason,
            field=failure.field,
        )
    for scores in event.scores:
        result.scores.add(
            row=scores.row, generation=scores.generation, prompt_index=scores.prompt_index, scores=scores.scores
        )
    for embedding in event.embeddings:
        result.embeddings.add(row=embedding.row, generation=embedding.generation, values=embedding.values)
    result.completed_copies = to_column(list(event.completed_copies))
    result.timings.copied_blocks = event.copied_blocks
    result.timings.copy_ns = round(event.copy_s * 1e9)
    result.timings.copy_delay_ns = round(event.copy_delay_s * 1e9)
    result.timings.idle_before_ns = round(event.idle_s * 1e9)
    return result


def _report(event: ev.GrammarReported) -> plan_pb2.GrammarReport:
    report = plan_pb2.GrammarReport(key=event.key)
    if event.failure is not None:
        report.failure = event.failure.reason
        report.cause = (
            plan_pb2.GRAMMAR_FAILURE_CAUSE_GRAMMAR
            if event.failure.is_invalid
            else plan_pb2.GRAMMAR_FAILURE_CAUSE_WORKER
        )
    return report


def _disk_report(event: ev.DiskReported) -> plan_pb2.DiskReport:
    report = plan_pb2.DiskReport(
        copy_id=event.copy_id,
        failed=to_column(list(event.failed)),
        duration_ns=round(event.seconds * 1e9),
        found=plan_pb2.DiskBlocks(
            slots=to_column([block.slot for block in event.found]),
            keys=b"".join(block.key for block in event.found),
            roots=b"".join(block.root for block in event.found),
            is_first=bytes(block.is_first for block in event.found),
        ),
        is_complete=event.is_complete,
    )
    for reason, count in event.refused:
        report.refused.add(reason=reason, count=count)
    return report


def _hello(event: ev.WorkerHello) -> plan_pb2.Hello:
    model = event.model
    hello = plan_pb2.Hello(
        worker_id=event.worker_id,
        block_size=event.block_size,
        num_blocks=event.num_blocks,
        max_rows=event.max_rows,
        max_tokens_per_step=event.max_tokens_per_step,
        num_host_blocks=event.num_host_blocks,
        num_disk_blocks=event.num_disk_blocks,
        num_checkpoints=event.num_checkpoints,
        num_host_states=event.num_host_states,
        max_draft_tokens=event.max_draft_tokens,
        num_kv_groups=event.num_kv_groups,
        window=event.window,
        window_chunk=event.window_chunk,
        reason=_REASONS[event.reason],
        protocol_version=PLAN_VERSIONS.newest,
        newest_protocol_version=PLAN_VERSIONS.newest,
    )
    hello.model.name, hello.model.architecture, hello.model.dtype = model.name, model.architecture, model.dtype
    hello.model.fingerprint, hello.model.max_model_len = model.fingerprint, model.max_model_len
    hello.model.vocab_size, hello.model.hidden_size = model.vocab_size, model.hidden_size
    hello.model.break_even_context, hello.model.state_bytes = model.break_even_context, model.state_bytes
    hello.model.eos_token_ids.extend(model.eos_token_ids)
    return hello


def _from_frontend(
    event: ev.RequestArrived | ev.StopMatched | ev.RequestCancelled | ev.CreditGranted | ev.ResumeAsked, now: float
) -> ev.Event:
    message = link_pb2.FrontendMessage()
    match event:
        case ev.RequestArrived():
            message.submissions.append(_submission(event, now))
        case ev.StopMatched():
            message.stop_matches.add(stream=event.stream, keep_tokens=event.keep_tokens)
        case ev.RequestCancelled(keep=True):
            message.detached = to_column([event.stream])
        case ev.RequestCancelled():
            message.cancelled = to_column([event.stream])
        case ev.CreditGranted():
            message.credit_streams, message.credit_bytes = to_column([event.stream]), to_column([event.credit])
        case ev.ResumeAsked():
            message.resume_questions.add(number=event.number, identity=event.identity)
    incoming: Incoming = frontend_link.decode(event.frontend, message.SerializeToString(), now)
    (decoded,) = incoming.events
    if isinstance(event, ev.RequestArrived) and isinstance(decoded, ev.RequestArrived):
        return _with_exact_times(event, decoded)
    if decoded != event:
        raise ViolationError("wire.frontend", f"{event} arrives as {decoded}")
    return decoded


def _submission(event: ev.RequestArrived, now: float) -> link_pb2.Submission:
    submission = link_pb2.Submission(
        stream=event.stream,
        token_ids=to_column(event.token_ids),
        credit=event.credit,
        block_keys=event.block_keys,
        block_size=event.block_size,
        again=event.again and not event.accepted,
        accepted=event.accepted,
        **event.spec._asdict(),
    )
    submission.deadline_ns = _remaining_ns(event.deadline, now)
    submission.ttft_target_ns = _remaining_ns(event.ttft_deadline, now)
    submission.total_time_target_ns = _remaining_ns(event.total_deadline, now)
    return submission


def _remaining_ns(time: float | None, now: float) -> int:
    return 0 if time is None else max(1, round((time - now) * 1e9))


def _with_exact_times(sent: ev.RequestArrived, decoded: ev.RequestArrived) -> ev.RequestArrived:
    """Return the decoded submission with the times that were sent, if they are as precise as possible."""
    times: dict[str, float | None] = {}
    for name in ("deadline", "ttft_deadline", "total_deadline"):
        wanted: float | None = getattr(sent, name)
        arrived: float | None = getattr(decoded, name)
        is_early = wanted is not None and arrived is not None and arrived < wanted - _PRECISION_S
        if (wanted is None) != (arrived is None) or is_early:
            stream = StreamName(sent.frontend, sent.stream)
            raise ViolationError("wire.frontend", f"{name} {wanted} arrives as {arrived}", stream)
        times[name] = wanted
    return dataclasses.replace(decoded, **times)  # type: ignore[arg-type]


# ---------------------------------------------------------------- to front ends and workers


def delivered(effect: ef.Effect) -> ef.Effect:
    """Return the effect as decoded by its front end or worker, if it is addressed to one."""
    if isinstance(effect, ef.DiskJobWanted):
        return dataclasses.replace(effect, job=_disk_job(effect))
    outgoing = Outgoing()
    match effect:
        case ef.TokensReady():
            outgoing.add_tokens(effect)
        case ef.ScoresReady():
            outgoing.add_scores(effect)
        case ef.RequestEnded():
            outgoing.add_end(effect)
        case ef.ResumeAnswered():
            outgoing.add_resume(effect)
        case _:
            return effect
    (frame,) = outgoing.encode(1)
    message = link_pb2.CoreMessage.FromString(frame)
    match effect:
        case ef.TokensReady():
            return dataclasses.replace(
                effect,
                streams=from_column(message.streams),
                first_indices=from_column(message.first_indices),
                tokens=from_column(message.tokens),
                counts=from_column(message.counts) if message.counts else None,
            )
        case ef.ScoresReady():
            (scores,) = message.scores
            return ef.ScoresReady(
                frontend=effect.frontend,
                stream=scores.stream,
                first_index=scores.first_index,
                of_prompt=scores.of_prompt,
                scores=scores.scores,
            )
        case ef.RequestEnded():
            (end,) = message.ends
            return _end(end, effect.frontend, effect.request_id)
        case ef.ResumeAnswered():
            (reply,) = message.resume_replies
            log = None if reply.not_found else _log(reply, effect.frontend)
            return ef.ResumeAnswered(frontend=effect.frontend, number=reply.number, log=log)
    return effect


def _disk_job(effect: ef.DiskJobWanted) -> DiskJob:
    """Return the job as its worker decodes it."""
    message = plan_pb2.SchedulerMessage.FromString(worker_link.encode_disk_job(effect.epoch, effect.job))
    sent = message.disk_job
    places = range(0, len(sent.blocks.keys), KEY_BYTES)
    return DiskJob(
        copy_id=sent.copy_id,
        action=DiskAction[plan_pb2.DiskAction.Name(sent.action).removeprefix("DISK_ACTION_")],
        host_blocks=tuple(from_column(sent.host_blocks).tolist()),
        blocks=tuple(
            DiskBlock(slot, sent.blocks.keys[at : at + KEY_BYTES], sent.blocks.roots[at : at + KEY_BYTES], bool(first))
            for slot, at, first in zip(
                from_column(sent.blocks.slots).tolist(), places, sent.blocks.is_first, strict=True
            )
        ),
    )


def _end(end: link_pb2.StreamEnd, frontend: Peer, request_id: str) -> ef.RequestEnded:
    return ef.RequestEnded(
        frontend=frontend,
        stream=end.stream,
        request_id=request_id,
        reason=EndReason[link_pb2.EndReason.Name(end.reason).removeprefix("END_REASON_")],
        message=end.message,
        retry_ms=end.retry_ms,
        completion_tokens=end.completion_tokens,
        stop_token_id=end.stop_token_id,
        cached_prompt_tokens=end.cached_prompt_tokens,
        preemptions=end.preemptions,
        draft_tokens=end.draft_tokens,
        accepted_draft_tokens=end.accepted_draft_tokens,
        queued_s=end.queued_ns / 1e9,
        embedding=end.embedding,
        field=end.field,
    )


def _log(reply: link_pb2.ResumeReply, frontend: Peer) -> Log:
    spec = read_spec(reply.submission)
    return Log(
        spec=spec,
        tokens=reply.submission.token_ids,
        scores=tuple((each.first_index, each.scores) for each in reply.scores),
        end=_end(reply.end, frontend, spec.request_id) if reply.HasField("end") else None,
    )


def planned(plan: Plan) -> Plan:
    """Return the plan as its worker decodes it."""
    frame = worker_link.encode_plan(plan, step_traceparent="", attempt_traceparents={})
    message = plan_pb2.SchedulerMessage.FromString(frame)
    sent = message.plan
    outs, ins = plan.swap_outs, plan.swap_ins
    ids = from_column(sent.copy_ids).tolist()
    return Plan(
        worker=plan.worker,
        epoch=message.epoch,
        step=sent.step,
        leaves=_column(sent.leaves),
        admissions=tuple(_admission(own, each) for own, each in zip(plan.admissions, sent.admissions, strict=True)),
        append_rows=_column(sent.append_rows),
        append_blocks=_column(sent.append_blocks),
        append_windows=_column(sent.append_windows),
        chunk_rows=_column(sent.chunk_rows),
        chunk_lengths=_column(sent.chunk_lengths),
        holds=_column(sent.holds),
        releases=_column(sent.releases),
        swap_outs=_copies(outs, ids[: len(outs)], sent.swap_out_blocks, sent.swap_out_host_blocks),
        swap_ins=_copies(ins, ids[len(outs) :], sent.swap_in_host_blocks, sent.swap_in_blocks),
        copy_sources=_column(sent.copy_sources),
        copy_targets=_column(sent.copy_targets),
        draft_rows=_column(sent.draft_rows),
        draft_limits=_column(sent.draft_limits),
        save_rows=_column(sent.save_rows),
        save_lengths=_column(sent.save_lengths),
        save_checkpoints=_column(sent.save_checkpoints),
        kept_checkpoints=_column(sent.kept_checkpoints),
        kept_places=_column(sent.kept_places),
        num_decodes=plan.num_decodes,
        num_tokens=plan.num_tokens,
        traced_rows=plan.traced_rows,
    )


def _column(column: bytes) -> IndexArray:
    return from_column(column).astype(np.intp)


def _admission(own: RowAdmission, sent: plan_pb2.Admission) -> RowAdmission:
    return RowAdmission(
        row=sent.row,
        generation=sent.generation,
        spec=own.spec._replace(
            request_id=sent.request_id,
            num_prompt_tokens=sent.num_prompt_tokens,
            sampling=sent.sampling,
            grammar=sent.grammar,
            pooling=int(sent.pooling),
        ),
        token_ids=from_column(sent.token_ids),
        num_computed_tokens=sent.num_computed_tokens,
        blocks=_column(sent.block_tables[0]),
        windows=None
        if len(sent.block_tables) == 1
        else WindowTables(
            first=sent.window_first,
            period=sent.window_period,
            tables=np.stack([_column(table) for table in sent.block_tables[1:]]),
        ),
        frontend=own.frontend,
        stream=own.stream,
        attempt=own.attempt,
        queued_since=own.queued_since,
        checkpoint=sent.checkpoint if sent.HasField("checkpoint") else None,
    )


def _copies(own: tuple[BlockCopy, ...], ids: list[int], sources: bytes, targets: bytes) -> tuple[BlockCopy, ...]:
    """Return the copies in one direction. The wire format has a single column for both directions."""
    if not own:
        return ()
    ends = np.cumsum([len(each.sources) for each in own])[:-1]
    parts = zip(ids, np.split(_column(sources), ends), np.split(_column(targets), ends), strict=False)
    return tuple(BlockCopy(copy_id=copy_id, sources=one, targets=other) for copy_id, one, other in parts)
