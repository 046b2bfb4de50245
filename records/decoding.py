"""Decodes a segment's batches into entries; the inverse of `encoding`.

Events have the form in which a replay passes them to the core: zeros replace token ids and opaque bytes, and tags
replace secrets.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos.quire.record.v1 import record_pb2 as pb
from records.values import (
    AdmissionDigest,
    CopyDigest,
    DiskJobSent,
    Entry,
    FrontendReported,
    PlanAsked,
    PlanDigest,
    Timings,
    What,
)
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import Int32Array
from scheduler_svc.core.interface.disk import DiskBlock
from scheduler_svc.core.interface.records import (
    EndReason,
    GrammarFailure,
    Log,
    Note,
    NoteKind,
    Peer,
    QueueNote,
    RequestEnded,
    WaitReason,
)
from scheduler_svc.core.memory.partial_blocks import PartialMatch
from scheduler_svc.recorder.steps import NS
from scheduler_svc.recorder.tags import fit, replay_key, to_keys
from scheduler_svc.recorder.tape import Facts
from shared.columns import from_column
from shared.frames import TOKEN_BYTES
from shared.request_spec import RequestSpec

_NO_ROWS: Int32Array = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowAtStart:
    """A row at the start of a segment."""

    row: int
    generation: int
    frontend: Peer
    stream: int
    prefill_left: int
    """Number of prompt tokens not yet in any plan; 0 if the row decodes."""
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAtStart:
    """A worker at the beginning of a segment."""

    hello: ev.WorkerHello
    epoch: int
    last_step: int
    answered_step: int
    rows: list[RowAtStart]
    obstacle: WaitReason | None = None
    """Limit that holds back the requests that compete for this worker; None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The core's state at the start of a segment."""

    release: str
    code: str
    """Hash of the core's source files; only identical code is sure to replay bit for bit."""
    config: str
    """The core's configuration, as JSON."""
    incarnation: int
    unix_ns: int
    """Wall clock at `core_time`, ns since 1970."""
    core_time: float
    has_tokens: bool
    fresh: bool
    """Whether the core was new, so that it has no earlier state."""
    needs_earlier: bool
    """Whether no snapshot was taken, so that a replay must start at an earlier segment."""
    first_index: int
    """Index of the first entry."""
    live: list[tuple[ev.RequestArrived, float]]
    """Live requests, with the core times of their arrivals."""
    workers: list[WorkerAtStart]


@dataclass(slots=True)
class _WorkerState:
    epoch: int = 0
    last_step: int = 0
    answered_step: int = 0
    num_decodes: int = 0
    answered_rows: Int32Array = field(default_factory=lambda: _NO_ROWS)
    received_us: int = 0


class Decoder:
    """Decodes one segment, whose batches must be passed in order."""

    def __init__(self) -> None:
        self._peers: list[Peer] = []
        self._workers: dict[Peer, _WorkerState] = {}
        self._ns = 0
        self._index = 0
        self._grammar_keys: dict[bytes, bytes] = {}

    def opening(self, batch: pb.Batch) -> Opening:
        """Return the opening in the first batch."""
        opening = batch.opening
        self._peers += batch.peers
        self._ns, self._index = opening.core_ns, opening.num_entries
        workers = []
        for state in opening.workers:
            hello = self._hello(state.hello)
            self._workers[hello.worker] = _WorkerState(state.epoch, state.last_step, state.answered_step)
            rows = [
                RowAtStart(
                    row=row.row,
                    generation=row.generation,
                    frontend=self._peers[row.frontend],
                    stream=row.stream,
                    prefill_left=row.prefill_left,
                    held=row.held,
                )
                for row in state.rows
            ]
            workers.append(
                WorkerAtStart(
                    hello=hello,
                    epoch=state.epoch,
                    last_step=state.last_step,
                    answered_step=state.answered_step,
                    rows=rows,
                    obstacle=WaitReason(state.obstacle) if state.obstacle else None,
                )
            )
        return Opening(
            release=opening.release,
            code=opening.code,
            config=opening.config,
            incarnation=opening.incarnation,
            unix_ns=opening.unix_ns,
            core_time=opening.core_ns / NS,
            has_tokens=opening.has_tokens,
            fresh=opening.fresh,
            needs_earlier=opening.needs_earlier,
            first_index=opening.num_entries,
            live=[(self._arrived(each), each.arrival) for each in opening.live],
            workers=workers,
        )

    def entries(self, batch: pb.Batch) -> Iterator[Entry]:
        if not batch.HasField("opening"):
            self._peers += batch.peers
        for entry in batch.entries:
            self._ns += entry.delta_ns
            time = entry.time if entry.HasField("time") else self._ns / NS
            timings = None
            if entry.WhichOneof("what") == "step_done" and entry.step_done.HasField("timings"):
                timings = self._timings(entry.step_done)
            yield Entry(self._index, time, self._what(entry, time), _facts(entry), timings)
            self._index += 1

    def _what(self, entry: pb.Entry, time: float) -> What | None:
        kind = entry.WhichOneof("what")
        if kind is None:
            return None
        message = getattr(entry, kind)
        peers = self._peers
        match kind:
            case "plan":
                return PlanAsked(worker=peers[message.worker], plan=self._plan(message))
            case "no_plan":
                return PlanAsked(worker=peers[message], plan=None)
            case "step_done":
                return self._step_done(message)
            case "credit":
                return ev.CreditGranted(frontend=peers[message.frontend], stream=message.stream, credit=message.credit)
            case "time_passed":
                return ev.TimePassed()
            case "arrived":
                return self._arrived(message)
            case "cancelled":
                return ev.RequestCancelled(frontend=peers[message.frontend], stream=message.stream, keep=message.keep)
            case "stop_matched":
                return ev.StopMatched(
                    frontend=peers[message.frontend], stream=message.stream, keep_tokens=message.keep_tokens
                )
            case "frontend_joined":
                return ev.FrontendJoined(frontend=peers[message])
            case "frontend_lost":
                return ev.FrontendLost(frontend=peers[message])
            case "hello":
                hello = self._hello(message)
                self._workers[hello.worker] = _WorkerState()
                return hello
            case "lost":
                self._workers.pop(peers[message.worker], None)
                return ev.WorkerLost(worker=peers[message.worker], reason=message.reason, orderly=message.orderly)
            case "compiling":
                return ev.WorkerCompiling(
                    worker=peers[message.worker], epoch=message.epoch, expected_s=message.expected_s
                )
            case "grammar":
                failure = GrammarFailure("not recorded", message.failure == 2) if message.failure else None
                key = self._grammar_keys.get(message.tag, fit(message.tag, 32))
                return ev.GrammarReported(worker=peers[message.worker], epoch=message.epoch, key=key, failure=failure)
            case "disk":
                return self._disk(message)
            case "drain":
                return ev.DrainRequested(worker_id=message.worker_id, move=message.move)
            case "resume":
                return ev.ResumeRequested(worker_id=message)
            case "resume_asked":
                return ev.ResumeAsked(
                    frontend=peers[message.frontend], number=message.number, identity=message.identity
                )
            case "dropped":
                return ev.RequestsDropped(identities=tuple(message.identities))
            case "restored":
                return ev.LogsRestored(logs=tuple((log.age, self._log(log)) for log in message.logs))
            case "shutdown":
                return ev.ShutdownRequested()
            case "ended":
                return self._ended(message)
            case "note":
                by = list(message.by)
                return Note(
                    frontend=peers[message.frontend],
                    stream=message.stream,
                    time=time,
                    kind=NoteKind(message.kind),
                    text=message.text,
                    by=(peers[by[0]], by[1]) if by else None,
                )
            case "disk_job":
                return DiskJobSent(
                    worker=peers[message.worker],
                    copy_id=message.copy_id,
                    reads=message.reads,
                    num_blocks=message.num_blocks,
                )
            case "queue_note":
                reason = WaitReason(message.reason) if message.reason else None
                return QueueNote(worker=peers[message.worker], time=time, reason=reason)
            case "report":
                return FrontendReported(frontend=peers[message.frontend], report=message.report)
            case _:
                self._workers[peers[message.worker]].epoch = message.epoch
                return ef.WorkerWelcomed(worker=peers[message.worker], epoch=message.epoch, protocol_version=0)

    def _plan(self, message: pb.Plan) -> PlanDigest:
        peer = self._peers[message.worker]
        worker = self._workers[peer]
        worker.last_step += 1 + message.step_jump
        worker.num_decodes += message.decodes_change
        lengths = list(message.chunk_lengths)
        return PlanDigest(
            worker=peer,
            epoch=message.epoch if message.HasField("epoch") else worker.epoch,
            step=worker.last_step,
            num_decodes=worker.num_decodes,
            num_tokens=worker.num_decodes + sum(lengths),
            leaves=list(message.leaves),
            admissions=[
                AdmissionDigest(
                    row=each.row,
                    generation=each.generation,
                    frontend=self._peers[each.frontend],
                    stream=each.stream,
                    num_tokens=each.num_tokens,
                    num_computed_tokens=each.num_computed,
                    attempt=each.attempt,
                    blocks=_sums(each.blocks),
                    checkpoint=each.checkpoint if each.HasField("checkpoint") else None,
                    window_tables=_sums(each.window_tables),
                    window_first=each.window_first,
                    window_period=each.window_period,
                )
                for each in message.admissions
            ],
            append_rows=from_column(message.append_rows).tolist(),
            append_blocks=_sums(message.append_blocks),
            append_windows=_sums(message.append_windows),
            chunk_rows=list(message.chunk_rows),
            chunk_lengths=lengths,
            holds=list(message.holds),
            releases=list(message.releases),
            swap_outs=_copies(message.swap_outs),
            swap_ins=_copies(message.swap_ins),
            copy_sources=_sums(message.copy_sources),
            copy_targets=_sums(message.copy_targets),
            draft_rows=list(message.draft_rows),
            draft_limits=list(message.draft_limits),
            save_rows=list(message.save_rows),
            save_lengths=list(message.save_lengths),
            save_checkpoints=list(message.save_checkpoints),
            kept_checkpoints=list(message.kept_checkpoints),
            kept_places=list(message.kept_places),
        )

    def _disk(self, message: pb.DiskReported) -> ev.DiskReported:
        keys = to_keys(message.keys)
        found = [
            DiskBlock(slot, keys[32 * place : 32 * (place + 1)], b"", bool(message.is_first[place]))
            for place, slot in enumerate(message.slots)
        ]
        return ev.DiskReported(
            worker=self._peers[message.worker],
            epoch=message.epoch,
            copy_id=message.copy_id,
            failed=tuple(message.failed),
            seconds=message.seconds,
            found=tuple(found),
            is_complete=message.is_complete,
            refused=tuple(message.refused.items()),
        )

    def _step_done(self, message: pb.StepDone) -> ev.StepDone:
        peer = self._peers[message.worker]
        worker = self._workers.get(peer) or _WorkerState()
        worker.answered_step += 1 + message.step_jump
        if message.rows:
            rows = np.array(message.rows, np.int32)
        else:
            rows = worker.answered_rows
            if message.rows_gone:
                rows = np.setdiff1d(rows, np.array(message.rows_gone, np.int32), assume_unique=True)
            if message.rows_added:
                rows = np.union1d(rows, np.array(message.rows_added, np.int32))
            worker.answered_rows = rows
        num_tokens = message.num_tokens if message.HasField("num_tokens") else len(rows)
        copy_s = delay_s = message.copy_s if message.HasField("copy_s") else message.copy_ns / NS
        if message.HasField("copy_delay_s"):
            delay_s = message.copy_delay_s
        elif message.HasField("copy_delay_ns"):
            delay_s = message.copy_delay_ns / NS
        return ev.StepDone(
            worker=peer,
            epoch=message.epoch if message.HasField("epoch") else worker.epoch,
            step=worker.answered_step,
            rows=rows,
            tokens=from_column(message.tokens) if message.tokens else np.zeros(num_tokens, np.int32),
            counts=np.array(message.counts, np.int32) if message.counts else None,
            draft_counts=np.array(message.draft_counts, np.int32) if message.draft_counts else None,
            failures=[
                ev.FailedRow(
                    row=each.row,
                    generation=each.generation,
                    kind=ev.FailureKind(each.kind),
                    reason="not recorded",
                    field=each.field,
                )
                for each in message.failures
            ],
            scores=[
                ev.RowScores(
                    row=each.row,
                    generation=each.generation,
                    prompt_index=each.prompt_index,
                    scores=bytes(each.size),
                )
                for each in message.scores
            ],
            embeddings=[
                ev.RowEmbedding(row=each.row, generation=each.generation, values=bytes(each.size))
                for each in message.embeddings
            ],
            completed_copies=list(message.copies),
            copied_blocks=message.copied_blocks,
            copy_s=copy_s,
            copy_delay_s=delay_s,
            idle_s=message.idle_s if message.HasField("idle_s") else message.idle_ns / NS,
        )

    def _timings(self, message: pb.StepDone) -> Timings:
        worker, timings = self._workers.get(self._peers[message.worker]) or _WorkerState(), message.timings
        worker.received_us += timings.received_delta_us
        return Timings(
            received_unix_us=worker.received_us,
            started_unix_us=worker.received_us + timings.started_us,
            prepare_us=timings.prepare_us,
            forward_us=timings.forward_us,
            sample_us=timings.sample_us,
            num_tokens=timings.num_tokens,
        )

    def _hello(self, message: pb.WorkerHello) -> ev.WorkerHello:
        values: dict[str, Any] = json.loads(message.values)
        model = values.pop("model")
        model["eos_token_ids"] = tuple(model["eos_token_ids"])
        reason = ev.HelloReason[values.pop("reason")]
        retained = tuple(_retained(each) for each in values.pop("retained", ()))
        return ev.WorkerHello(
            worker=self._peers[message.worker],
            model=ev.ModelFacts(**model),
            reason=reason,
            retained=retained,
            **values,
        )

    def _arrived(self, message: pb.RequestArrived) -> ev.RequestArrived:
        num_tokens = message.num_tokens or message.spec.num_prompt_tokens
        return ev.RequestArrived(
            frontend=self._peers[message.frontend],
            stream=message.stream,
            spec=self._spec(message.spec),
            token_ids=from_column(message.tokens) if message.tokens else np.zeros(num_tokens, np.int32),
            credit=message.credit,
            deadline=message.deadline if message.HasField("deadline") else None,
            ttft_deadline=message.ttft_deadline if message.HasField("ttft_deadline") else None,
            total_deadline=message.total_deadline if message.HasField("total_deadline") else None,
            block_keys=to_keys(message.block_keys),
            block_size=message.block_size,
            again=message.again,
            accepted=message.accepted,
        )

    def _spec(self, message: pb.Spec) -> RequestSpec:
        grammar = fit(message.grammar_tag, message.grammar_size)
        if grammar:
            self._grammar_keys[message.grammar_tag] = replay_key(message.grammar_tag, message.grammar_size)
        return RequestSpec(
            request_id=message.request_id,
            num_prompt_tokens=message.num_prompt_tokens,
            max_tokens=message.max_tokens,
            stop_token_ids=bytes(4 * message.num_stops),
            sampling=bytes(message.sampling_size),
            grammar=grammar,
            pooling=message.pooling,
            computes_whole_prompt=message.computes_whole_prompt,
            tenant=message.tenant,
            request_class=message.request_class,
            priority=message.priority,
            expected_output_tokens=message.expected_output_tokens,
            cache_scope=message.cache_scope,
            session=message.session,
            ends_session=message.ends_session,
            retention_s=message.retention_s,
            retention_priority=message.retention_priority,
            expected_pause_s=message.expected_pause_s,
            model=message.model,
            identity=message.identity,
            resume_info=bytes(message.resume_size),
            traceparent=message.traceparent,
        )

    def _log(self, message: pb.RestoredLog) -> Log:
        scores = zip(message.score_indices, message.score_sizes, strict=True)
        return Log(
            spec=self._spec(message.spec),
            tokens=bytes(4 * message.num_tokens),
            scores=tuple((index, bytes(size)) for index, size in scores),
            end=self._ended(message.end) if message.HasField("end") else None,
            charged_tokens=message.charged_tokens,
        )

    def _ended(self, message: pb.RequestEnded) -> RequestEnded:
        return RequestEnded(
            frontend=self._peers[message.frontend],
            stream=message.stream,
            request_id="",
            reason=EndReason(message.reason),
            retry_ms=message.retry_ms,
            completion_tokens=message.completion_tokens,
            cached_prompt_tokens=message.cached_prompt_tokens,
            preemptions=message.preemptions,
            queued_s=message.queued_s,
            draft_tokens=message.draft_tokens,
            accepted_draft_tokens=message.accepted_draft_tokens,
            energy_j=message.energy_j,
        )


def _facts(entry: pb.Entry) -> Facts | None:
    if not (entry.keys or entry.partial or entry.stopped or entry.held):
        return None
    partial = list(entry.partial)
    matches = [
        PartialMatch(partial[at], partial[at + 1]) if partial[at] >= 0 else None for at in range(0, len(partial), 2)
    ]
    return Facts(entry.keys, matches, list(entry.stopped), list(entry.held))


def _sums(differences: bytes) -> list[int]:
    found: list[int] = np.cumsum(from_column(differences), dtype=np.int64).tolist()
    return found


def _copies(messages: Any) -> list[CopyDigest]:
    return [
        CopyDigest(copy_id=each.copy_id, sources=_sums(each.sources), targets=_sums(each.targets)) for each in messages
    ]


def _retained(values: dict[str, Any]) -> ev.RetainedSequence:
    tokens = bytes.fromhex(values["tokens"]) or bytes(TOKEN_BYTES * values["num_tokens"])
    blocks = np.array(values["blocks"], np.intp)
    root = bytes.fromhex(values["root"])
    return ev.RetainedSequence(root=root, tokens=tokens, blocks=blocks, is_proven=values["is_proven"])
