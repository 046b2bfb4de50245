"""Encodes a tape into one segment's entries, as deltas to earlier entries."""

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

from protos.quire.plan.v1 import plan_pb2
from protos.quire.record.v1 import record_pb2 as pb
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.disk import DiskAction
from scheduler_svc.core.interface.records import Line, NoteKind, Peer, QueueNote, RequestEnded, to_note
from scheduler_svc.recorder.step_view import About, StepView
from scheduler_svc.recorder.steps import NS, WorkerState, write_answer, write_plan
from scheduler_svc.recorder.tags import Tagger
from scheduler_svc.recorder.tape import Facts, Handled, Item, Planned, Reported
from shared.columns import to_column
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import RequestSpec


class Encoder:
    """Encoder for one core's tape. It tracks live requests, so that it can begin a segment at any time."""

    def __init__(self, tagger: Tagger, *, with_tokens: bool) -> None:
        self._tagger = tagger
        self._with_tokens = with_tokens
        self._batch = pb.Batch()
        self._peers: dict[Peer, int] = {}
        self._workers: dict[Peer, WorkerState] = {}
        self._live: dict[tuple[Peer, int], pb.RequestArrived] = {}
        """Arrivals of live requests, without tokens and block keys."""
        self._ns = 0
        self.num_entries = 0
        """Entries since the core began."""
        self.view: StepView | None = None
        """Receives plans and results while an operator watches. An error in it ends the view."""
        self.view_error: Exception | None = None

    def begin(self, now: float) -> pb.Opening:
        """Begin a segment; return its opening, without the fields that only the caller knows."""
        self._peers = {}
        self._ns = round(now * NS)
        self._workers = {peer: worker for peer, worker in self._workers.items() if not worker.is_gone}
        opening = pb.Opening(core_ns=self._ns, has_tokens=self._with_tokens, num_entries=self.num_entries)
        for (frontend, _), arrived in self._live.items():
            live = opening.live.add()
            live.CopyFrom(arrived)
            live.frontend = self._peer(frontend)
        for peer, worker in self._workers.items():
            worker.answered_rows, worker.num_decodes, worker.received_us = b"", 0, 0
            state = opening.workers.add(
                epoch=worker.epoch, last_step=worker.last_step, answered_step=worker.answered_step
            )
            self._hello(state.hello, peer, worker.hello)
            state.obstacle = worker.obstacle
            for number, row in worker.rows.items():
                state.rows.add(
                    row=number,
                    generation=row.generation,
                    frontend=self._peer(row.frontend),
                    stream=row.stream,
                    prefill_left=row.prefill_left,
                    held=row.held,
                )
        return opening

    def encode(self, items: Iterable[Item]) -> None:
        """Add the entries of some calls to the batch."""
        for item in items:
            if isinstance(item, Planned):
                self._planned(item)
            elif isinstance(item, Handled):
                if self.view is not None and isinstance(item.event, ev.WorkerLost):
                    self._give(self._show_lost, item.event, item.now)
                self._handled(item)
            elif isinstance(item, Reported):
                entry = self._entry(item.now)
                entry.report.frontend, entry.report.report = self._peer(item.frontend), item.report.SerializeToString()
                continue
            else:
                self._facts(self._entry(item.now), item.facts)
                continue
            if self.view is not None:
                self._give(self._show_call, item)
            for note in item.notes:
                if isinstance(note, QueueNote):
                    worker = self._workers[note.worker]
                    worker.obstacle = "" if note.reason is None else note.reason.value
                    message = self._entry(note.time).queue_note
                    message.worker, message.reason = self._peer(note.worker), worker.obstacle
                else:
                    self._note(*note)
            for effect in item.effects:
                kind = type(effect)
                if kind is ef.TokensReady:
                    continue
                if isinstance(effect, RequestEnded):
                    self._live.pop((effect.frontend, effect.stream), None)
                    self._ended(self._entry(item.now).ended, effect)
                elif isinstance(effect, ef.FrontendUnknown):
                    if isinstance(item, Handled) and isinstance(item.event, ev.RequestArrived):
                        self._live.pop((item.event.frontend, item.event.stream), None)
                elif isinstance(effect, ef.WorkerWelcomed):
                    self._workers[effect.worker].epoch = effect.epoch
                    entry = self._entry(item.now)
                    entry.welcomed.worker, entry.welcomed.epoch = self._peer(effect.worker), effect.epoch
                elif isinstance(effect, ef.DiskJobWanted):
                    self._disk_job(self._entry(item.now).disk_job, effect)
                elif isinstance(effect, ef.WorkerUnknown | ef.WorkerRefused) and effect.worker in self._workers:
                    self._workers[effect.worker].is_gone = True

    def take(self) -> pb.Batch:
        """Return the batch collected since the last call."""
        batch, self._batch = self._batch, pb.Batch()
        return batch

    def show_load(self, now: float) -> None:
        """Pass the live requests and the rows to the view."""
        self._give(self._show_load, now)

    def _give(self, show: Callable[..., None], *arguments: Any) -> None:
        """Call a function with the view, if one is open. An error closes the view but not the recording."""
        if self.view is None:
            return
        try:
            show(self.view, *arguments)
        except Exception as error:
            self.view, self.view_error = None, error

    def _show_load(self, view: StepView, now: float) -> None:
        live = {key: _about(arrived.spec) for key, arrived in self._live.items()}
        rows = [row for worker in self._workers.values() if not worker.is_gone for row in worker.rows.values()]
        view.add_load(now, rows, live)

    def _show_call(self, view: StepView, item: Planned | Handled) -> None:
        """Show an encoded call to a view."""
        if isinstance(item, Planned):
            if item.plan is not None:
                worker = self._workers[item.plan.worker]
                view.planned(item.plan, worker.hello.worker_id, worker.rows, item.now)
        elif isinstance(item.event, ev.StepDone):
            view.answered(item.event, item.timings, item.now)
        elif isinstance(item.event, ev.RequestArrived):
            view.arrived(item.event, item.now)
        elif isinstance(item.event, ev.WorkerHello):
            view.joined(item.event.worker, item.event.worker_id, item.now)
        for note in item.notes:
            if isinstance(note, QueueNote):
                continue
            key, line = note
            arrived = self._live.get(key)
            view.noted(to_note(key, line), "" if arrived is None else arrived.spec.request_id)
        for effect in item.effects:
            if isinstance(effect, RequestEnded):
                view.ended(effect, item.now)

    def _show_lost(self, view: StepView, event: ev.WorkerLost, now: float) -> None:
        """Show the loss of a worker to a view. The encoder has dropped the worker."""
        worker = self._workers.get(event.worker)
        if worker is not None:
            view.lost(event.worker, worker.hello.worker_id, event.reason, now)

    def _note(self, key: tuple[Peer, int], line: Line) -> None:
        time, kind, text, by = line
        message = self._entry(time).note
        _fill(message, self._peer(key[0]), key[1])
        if not isinstance(text, str):
            text = text.text
        if kind is NoteKind.ENDED and not self._with_tokens:
            text = text.partition(" (")[0]  # The final message may quote the request.
        message.kind, message.text = kind.value, text
        if by is not None:
            message.by.extend((self._peer(by[0]), by[1]))

    # ---------------------------------------------------------------- entries

    def _entry(self, now: float) -> pb.Entry:
        self.num_entries += 1
        entry = self._batch.entries.add()
        ns = round(now * NS)
        if ns != self._ns:
            entry.delta_ns = ns - self._ns
            self._ns = ns
        if ns / NS != now:
            entry.time = now
        return entry

    def _peer(self, peer: Peer) -> int:
        number = self._peers.get(peer)
        if number is None:
            number = self._peers[peer] = len(self._peers)
            self._batch.peers.append(peer)
        return number

    def _facts(self, entry: pb.Entry, facts: Facts) -> None:
        if facts.keys:
            entry.keys = self._tagger.tag_keys(facts.keys)
        for match in facts.partial:
            entry.partial.extend((-1, 0) if match is None else match)
        if facts.stopped:
            entry.stopped.extend(facts.stopped)
        if facts.held:
            entry.held.extend(facts.held)

    # ---------------------------------------------------------------- plans

    def _planned(self, item: Planned) -> None:
        entry = self._entry(item.now)
        if item.facts is not None:
            self._facts(entry, item.facts)
        plan = item.plan
        if plan is None:
            entry.no_plan = self._peer(item.peer)
            return
        entry.plan.worker = self._peer(plan.worker)
        write_plan(entry.plan, plan, self._workers[plan.worker], self._peer)

    # ---------------------------------------------------------------- events

    def _handled(self, item: Handled) -> None:
        entry = self._entry(item.now)
        if item.facts is not None:
            self._facts(entry, item.facts)
        event = item.event
        kind = type(event)
        if kind is ev.StepDone:
            self._step_done(entry.step_done, event, item.timings)  # type: ignore[arg-type]
        elif kind is ev.CreditGranted:
            _fill(entry.credit, self._peer(event.frontend), event.stream)  # type: ignore[union-attr]
            entry.credit.credit = event.credit  # type: ignore[union-attr]
        elif kind is ev.TimePassed:
            entry.time_passed = True
        elif kind is ev.RequestArrived:
            self._arrived(entry.arrived, event, item.now)  # type: ignore[arg-type]
        else:
            self._other(entry, event)

    def _other(self, entry: pb.Entry, event: ev.Event) -> None:
        match event:
            case ev.RequestCancelled():
                _fill(entry.cancelled, self._peer(event.frontend), event.stream)
                entry.cancelled.keep = event.keep
            case ev.StopMatched():
                _fill(entry.stop_matched, self._peer(event.frontend), event.stream)
                entry.stop_matched.keep_tokens = event.keep_tokens
            case ev.FrontendJoined():
                entry.frontend_joined = self._peer(event.frontend)
            case ev.FrontendLost():
                entry.frontend_lost = self._peer(event.frontend)
            case ev.WorkerHello():
                self._workers[event.worker] = WorkerState(dataclasses.replace(event, retained=()))
                self._hello(entry.hello, event.worker, event)
            case ev.WorkerLost():
                entry.lost.worker, entry.lost.orderly = self._peer(event.worker), event.orderly
                entry.lost.reason = event.reason
                self._workers.pop(event.worker, None)
            case ev.WorkerCompiling():
                entry.compiling.worker, entry.compiling.epoch = self._peer(event.worker), event.epoch
                entry.compiling.expected_s = event.expected_s
            case ev.GrammarReported():
                entry.grammar.worker, entry.grammar.epoch = self._peer(event.worker), event.epoch
                entry.grammar.tag = self._tagger.tag(event.key)
                entry.grammar.failure = 0 if event.failure is None else 1 + event.failure.is_invalid
            case ev.DiskReported():
                self._disk(entry.disk, event)
            case ev.DrainRequested():
                entry.drain.worker_id, entry.drain.move = event.worker_id, event.move
                entry.drain.SetInParent()
            case ev.ResumeRequested():
                entry.resume = event.worker_id
            case ev.ResumeAsked():
                entry.resume_asked.frontend, entry.resume_asked.number = self._peer(event.frontend), event.number
                entry.resume_asked.identity = self._tagger.tag(event.identity)
            case ev.RequestsDropped():
                entry.dropped.identities.extend(map(self._tagger.tag, event.identities))
                entry.dropped.SetInParent()
            case ev.LogsRestored():
                entry.restored.SetInParent()
                for age, log in event.logs:
                    restored = entry.restored.logs.add(
                        age=age, num_tokens=len(log.tokens) // 4, charged_tokens=log.charged_tokens
                    )
                    self._spec(restored.spec, log.spec)
                    restored.score_indices.extend(index for index, _ in log.scores)
                    restored.score_sizes.extend(len(scores) for _, scores in log.scores)
                    if log.end is not None:
                        self._ended(restored.end, log.end)
            case ev.ShutdownRequested():
                entry.shutdown = True
            case _:
                raise AssertionError(f"an event without a message: {event}")

    def _disk_job(self, message: pb.DiskJob, effect: ef.DiskJobWanted) -> None:
        job = effect.job
        message.worker, message.copy_id = self._peer(effect.worker), job.copy_id
        message.reads, message.num_blocks = job.action is DiskAction.READ, len(job.blocks)

    def _disk(self, message: pb.DiskReported, event: ev.DiskReported) -> None:
        message.worker, message.epoch, message.copy_id = self._peer(event.worker), event.epoch, event.copy_id
        message.failed.extend(event.failed)
        message.seconds, message.is_complete = event.seconds, event.is_complete
        message.slots.extend(block.slot for block in event.found)
        message.keys = self._tagger.tag_keys(b"".join(block.key for block in event.found))
        message.is_first = bytes(block.is_first for block in event.found)
        for reason, count in event.refused:
            message.refused[reason] = count

    def _step_done(self, message: pb.StepDone, event: ev.StepDone, timings: plan_pb2.StepTimings | None) -> None:
        message.worker = self._peer(event.worker)
        # Results from an unknown worker cannot be encoded as deltas.
        worker = self._workers.get(event.worker) or WorkerState(_STRANGER)
        write_answer(message, event, timings, worker, with_tokens=self._with_tokens)

    def _hello(self, message: pb.WorkerHello, peer: Peer, event: ev.WorkerHello) -> None:
        values = dataclasses.asdict(dataclasses.replace(event, retained=())) | {"reason": event.reason.name}
        values["retained"] = [self._retained(each) for each in event.retained]
        del values["worker"]
        message.worker, message.worker_id, message.values = self._peer(peer), event.worker_id, json.dumps(values)

    def _retained(self, sequence: ev.RetainedSequence) -> dict[str, Any]:
        return {
            "root": self._tagger.tag(sequence.root).hex(),
            "num_tokens": len(sequence.tokens) // TOKEN_BYTES,
            "tokens": sequence.tokens.hex() if self._with_tokens else "",
            "blocks": sequence.blocks.tolist(),
            "is_proven": sequence.is_proven,
        }

    def _arrived(self, message: pb.RequestArrived, event: ev.RequestArrived, now: float) -> None:
        message.frontend, message.stream = self._peer(event.frontend), event.stream
        self._spec(message.spec, event.spec)
        num_tokens = len(event.token_ids)
        if num_tokens != event.spec.num_prompt_tokens:
            message.num_tokens = num_tokens
        message.credit, message.again, message.accepted = event.credit, event.again, event.accepted
        if event.deadline is not None:
            message.deadline = event.deadline
        if event.ttft_deadline is not None:
            message.ttft_deadline = event.ttft_deadline
        if event.total_deadline is not None:
            message.total_deadline = event.total_deadline
        key = (event.frontend, event.stream)
        if key not in self._live:  # If a request is submitted twice, the core keeps the first submission.
            live = self._live[key] = pb.RequestArrived()
            live.CopyFrom(message)
            live.arrival = now
        if self._with_tokens:
            message.tokens = to_column(event.token_ids)
        if event.block_keys:
            message.block_keys = self._tagger.tag_keys(
                event.block_keys[: len(event.block_keys) // KEY_BYTES * KEY_BYTES]
            )
            message.block_size = event.block_size

    def _spec(self, message: pb.Spec, spec: RequestSpec) -> None:
        message.request_id = spec.request_id
        message.num_prompt_tokens, message.max_tokens = spec.num_prompt_tokens, spec.max_tokens
        message.num_stops, message.sampling_size = len(spec.stop_token_ids) // 4, len(spec.sampling)
        if spec.grammar:
            message.grammar_size = len(spec.grammar)
            message.grammar_tag = self._tagger.grammar_tag(spec.grammar)
        message.pooling, message.computes_whole_prompt = spec.pooling, spec.computes_whole_prompt
        message.tenant, message.request_class, message.priority = spec.tenant, spec.request_class, spec.priority
        message.expected_output_tokens = spec.expected_output_tokens
        message.cache_scope = self._tagger.tag(spec.cache_scope)
        message.session, message.ends_session = self._tagger.tag(spec.session), spec.ends_session
        message.retention_s, message.retention_priority = spec.retention_s, spec.retention_priority
        message.expected_pause_s = spec.expected_pause_s
        message.model, message.traceparent = spec.model, spec.traceparent
        message.identity, message.resume_size = self._tagger.tag(spec.identity), len(spec.resume_info)

    def _ended(self, message: pb.RequestEnded, end: RequestEnded) -> None:
        _fill(message, self._peer(end.frontend), end.stream)
        message.reason, message.completion_tokens = end.reason.value, end.completion_tokens
        message.cached_prompt_tokens, message.preemptions = end.cached_prompt_tokens, end.preemptions
        message.queued_s, message.retry_ms = end.queued_s, end.retry_ms
        message.draft_tokens, message.accepted_draft_tokens = end.draft_tokens, end.accepted_draft_tokens
        message.energy_j = end.energy_j


_STRANGER = ev.WorkerHello(
    worker=b"",
    worker_id="",
    model=ev.ModelFacts(
        name="", architecture="", fingerprint="", max_model_len=0, vocab_size=0, dtype="", eos_token_ids=()
    ),
    block_size=0,
    num_blocks=0,
    max_rows=0,
    max_tokens_per_step=0,
)


def _fill(message: Any, frontend: int, stream: int) -> None:
    message.frontend, message.stream = frontend, stream
    message.SetInParent()


def _about(spec: pb.Spec) -> About:
    return About(spec.request_id, spec.tenant, spec.num_prompt_tokens, spec.max_tokens, spec.traceparent)
