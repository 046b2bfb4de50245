"""Encoding of a tape into the entries of one segment, as differences to earlier entries."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from protos.quire.record.v1 import record_pb2 as pb
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.plan import BlockCopy, Plan
from scheduler_svc.core.interface.records import Note, NoteKind, Peer, RequestEnded
from scheduler_svc.recorder.step_view import About, StepView
from scheduler_svc.recorder.tags import Tagger
from scheduler_svc.recorder.tape import Handled, Item, Planned, Reported
from scheduler_svc.recorder.values import Facts
from shared.columns import from_column, to_column
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import RequestSpec

NS = 1e9


@dataclass(slots=True)
class _Row:
    generation: int
    frontend: Peer
    stream: int
    prefill_left: int
    held: bool = False


@dataclass(slots=True)
class _WorkerState:
    hello: ev.WorkerHello
    epoch: int = 0
    last_step: int = 0
    answered_step: int = 0
    num_decodes: int = 0
    answered_rows: bytes = b""
    """Column of the rows of its last answer."""
    received_us: int = 0
    rows: dict[int, _Row] = field(default_factory=dict)
    is_gone: bool = False
    """Whether the core has dropped it; its late messages may follow."""


@dataclass(slots=True)
class _DecodeSteps:
    """Fields of `DecodeSteps`; lists of Python cost less per value than fields of messages."""

    plan_places: list[int] = field(default_factory=list)
    plan_times: list[float] = field(default_factory=list)
    plan_workers: list[int] = field(default_factory=list)
    decodes_changes: list[int] = field(default_factory=list)
    appends: list[int] = field(default_factory=list)
    appending: list[Plan] = field(default_factory=list)
    """The plans that append blocks."""
    answer_places: list[int] = field(default_factory=list)
    answer_times: list[float] = field(default_factory=list)
    answer_workers: list[int] = field(default_factory=list)
    idle_ns: list[int] = field(default_factory=list)
    has_timings: list[bool] = field(default_factory=list)
    timings: list[int] = field(default_factory=list)
    last_plan: int = 0
    """Place of the last plan."""
    last_answer: int = 0

    def write(self, steps: pb.DecodeSteps) -> None:
        """Fill in the message."""
        steps.plan_places.extend(self.plan_places)
        steps.plan_times.extend(self.plan_times)
        steps.plan_workers.extend(self.plan_workers)
        steps.decodes_changes.extend(self.decodes_changes)
        steps.appends.extend(self.appends)
        if self.appending:
            steps.append_rows = to_column(np.concatenate([plan.append_rows for plan in self.appending]))
            steps.append_blocks = _differences(np.concatenate([plan.append_blocks for plan in self.appending]))
        steps.answer_places.extend(self.answer_places)
        steps.answer_times.extend(self.answer_times)
        steps.answer_workers.extend(self.answer_workers)
        steps.idle_ns.extend(self.idle_ns)
        steps.has_timings.extend(self.has_timings)
        steps.timings.extend(self.timings)


class Encoder:
    """Encoder of one core's tape; it knows what is live, so that it can begin a segment at any time."""

    def __init__(self, tagger: Tagger, *, with_tokens: bool) -> None:
        self._tagger = tagger
        self._with_tokens = with_tokens
        self._batch = pb.Batch()
        self._peers: dict[Peer, int] = {}
        self._workers: dict[Peer, _WorkerState] = {}
        self._live: dict[tuple[Peer, int], pb.RequestArrived] = {}
        """Arrivals of live requests, without what only the core keeps: tokens and block keys."""
        self._ns = 0
        self.num_entries = 0
        """Entries since the core began, calls in `DecodeSteps` included."""
        self._taken = 0
        """Those of them that are not in the current batch."""
        self._decodes = _DecodeSteps()
        self.view: StepView | None = None
        """Gets the plans and answers while somebody watches; an error of its own ends it."""
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
                if not self._only_decodes(item):
                    self._planned(item)
            elif isinstance(item, Handled):
                if self.view is not None and isinstance(item.event, ev.WorkerLost):
                    self._give(self._show_lost, item.event, item.now)
                if not self._decoded_again(item):
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
                self._note(note)
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
                elif isinstance(effect, ef.WorkerUnknown | ef.WorkerRefused) and effect.worker in self._workers:
                    self._workers[effect.worker].is_gone = True

    def take(self) -> pb.Batch:
        """Return the batch since the last call."""
        batch, self._batch = self._batch, pb.Batch()
        self._taken = self.num_entries
        decodes = self._decodes
        if decodes.plan_places or decodes.answer_places:
            decodes.write(batch.decode_steps)
            self._decodes = _DecodeSteps()
        return batch

    def show_load(self, now: float) -> None:
        """Give the view the live requests and the rows."""
        self._give(self._show_load, now)

    def _give(self, show: Callable[..., None], *arguments: Any) -> None:
        """Call a function with the view, if there is one. An error ends the view, so that the recording goes on."""
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
        """Give a view a call that has been encoded."""
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
            arrived = self._live.get((note.frontend, note.stream))
            view.noted(note, "" if arrived is None else arrived.spec.request_id)
        for effect in item.effects:
            if isinstance(effect, RequestEnded):
                view.ended(effect, item.now)

    def _show_lost(self, view: StepView, event: ev.WorkerLost, now: float) -> None:
        """Give a view the loss of a worker, which is forgotten when it has been encoded."""
        worker = self._workers.get(event.worker)
        if worker is not None:
            view.lost(event.worker, worker.hello.worker_id, event.reason, now)

    def _note(self, note: Note) -> None:
        message = self._entry(note.time).note
        _fill(message, self._peer(note.frontend), note.stream)
        # The message of an end may quote the request.
        text = note.text.partition(" (")[0] if note.kind is NoteKind.ENDED and not self._with_tokens else note.text
        message.kind, message.text = note.kind.value, text
        if note.by is not None:
            message.by.extend((self._peer(note.by[0]), note.by[1]))

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

    def _only_decodes(self, item: Planned) -> bool:
        """Add a plan to the decode steps; return False if it holds more than decode rows and their new blocks."""
        plan = item.plan
        if plan is None or item.facts is not None:
            return False
        worker = self._workers[plan.worker]
        if (
            plan.step != worker.last_step + 1
            or plan.epoch != worker.epoch
            or plan.admissions
            or len(plan.leaves)
            or len(plan.chunk_rows)
            or len(plan.holds)
            or len(plan.releases)
            or plan.swap_outs
            or plan.swap_ins
            or len(plan.copy_sources)
            or len(plan.draft_rows)
        ):
            return False
        decodes, place = self._decodes, self.num_entries - self._taken
        decodes.plan_places.append(place - decodes.last_plan)
        decodes.last_plan = place
        decodes.plan_times.append(item.now)
        decodes.plan_workers.append(self._peer(plan.worker))
        decodes.decodes_changes.append(plan.num_decodes - worker.num_decodes)
        num_appends = len(plan.append_rows)
        decodes.appends.append(num_appends)
        if num_appends:
            decodes.appending.append(plan)
        worker.last_step, worker.num_decodes = plan.step, plan.num_decodes
        self.num_entries += 1
        return True

    def _planned(self, item: Planned) -> None:
        entry = self._entry(item.now)
        if item.facts is not None:
            self._facts(entry, item.facts)
        plan = item.plan
        if plan is None:
            entry.no_plan = self._peer(item.peer)
            return
        worker = self._workers[plan.worker]
        message = entry.plan
        message.worker = self._peer(plan.worker)
        message.SetInParent()
        if plan.step != worker.last_step + 1:
            message.step_jump = plan.step - worker.last_step - 1
        worker.last_step = plan.step
        if plan.num_decodes != worker.num_decodes:
            message.decodes_change = plan.num_decodes - worker.num_decodes
            worker.num_decodes = plan.num_decodes
        if plan.epoch != worker.epoch:
            message.epoch = plan.epoch
        rows = worker.rows
        if len(plan.leaves):
            leaves = plan.leaves.tolist()
            message.leaves.extend(leaves)
            for row in leaves:
                rows.pop(row, None)
        for admission in plan.admissions:
            num_tokens = len(admission.token_ids)
            message.admissions.add(
                row=admission.row,
                generation=admission.generation,
                frontend=self._peer(admission.frontend),
                stream=admission.stream,
                num_tokens=num_tokens,
                num_computed=admission.num_computed_tokens,
                attempt=admission.attempt,
                blocks=_differences(admission.blocks),
            )
            rows[admission.row] = _Row(
                admission.generation, admission.frontend, admission.stream, num_tokens - admission.num_computed_tokens
            )
        if len(plan.append_rows):
            message.append_rows = to_column(plan.append_rows)
            message.append_blocks = _differences(plan.append_blocks)
        if len(plan.chunk_rows):
            chunk_rows, lengths = plan.chunk_rows.tolist(), plan.chunk_lengths.tolist()
            message.chunk_rows.extend(chunk_rows)
            message.chunk_lengths.extend(lengths)
            for row, length in zip(chunk_rows, lengths, strict=True):
                rows[row].prefill_left -= length
        for column, into, held in ((plan.holds, message.holds, True), (plan.releases, message.releases, False)):
            if len(column):
                values = column.tolist()
                into.extend(values)
                for row in values:
                    if row in rows:
                        rows[row].held = held
        if plan.swap_outs:
            _add_copies(message.swap_outs, plan.swap_outs)
        if plan.swap_ins:
            _add_copies(message.swap_ins, plan.swap_ins)
        if len(plan.copy_sources):
            message.copy_sources = _differences(plan.copy_sources)
            message.copy_targets = _differences(plan.copy_targets)
        if len(plan.draft_rows):
            message.draft_rows.extend(plan.draft_rows.tolist())
            message.draft_limits.extend(plan.draft_limits.tolist())

    # ---------------------------------------------------------------- events

    def _decoded_again(self, item: Handled) -> bool:
        """Add an answer to the decode steps; return False if it says more than that the same rows decoded again."""
        event = item.event
        if type(event) is not ev.StepDone:
            return False
        worker = self._workers.get(event.worker)
        if (
            worker is None
            or self._with_tokens
            or item.facts is not None
            or event.step != worker.answered_step + 1
            or event.epoch != worker.epoch
            or event.rows.tobytes() != worker.answered_rows
            or len(event.tokens) != len(event.rows)
            or event.counts is not None
            or event.draft_counts is not None
            or event.failures
            or event.scores
            or event.embeddings
            or event.completed_copies
            or event.copied_blocks
            or event.copy_s
        ):
            return False
        idle_ns = round(event.idle_s * NS)
        if idle_ns / NS != event.idle_s:
            return False
        worker.answered_step = event.step
        decodes, place = self._decodes, self.num_entries - self._taken
        decodes.answer_places.append(place - decodes.last_answer)
        decodes.last_answer = place
        decodes.answer_times.append(item.now)
        decodes.answer_workers.append(self._peer(event.worker))
        decodes.idle_ns.append(idle_ns)
        decodes.has_timings.append(item.timings is not None)
        if item.timings is not None:
            decodes.timings += _timed(worker, item.timings)
        self.num_entries += 1
        return True

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
                self._workers[event.worker] = _WorkerState(event)
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

    def _step_done(self, message: pb.StepDone, event: ev.StepDone, timings: plan_pb2.StepTimings | None) -> None:
        message.worker = self._peer(event.worker)
        message.SetInParent()
        worker = self._workers.get(event.worker)
        if worker is None:
            # Sent by a stranger; its values are differences to nothing.
            worker = _WorkerState(_STRANGER)
        if event.epoch != worker.epoch:
            message.epoch = event.epoch
        if event.step != worker.answered_step + 1:
            message.step_jump = event.step - worker.answered_step - 1
        worker.answered_step = event.step
        rows, column = event.rows, event.rows.tobytes()
        if column != worker.answered_rows:
            before = from_column(worker.answered_rows)
            if len(rows) > 1 and not (rows[1:] > rows[:-1]).all():
                message.rows.extend(rows.tolist())
            else:
                message.rows_added.extend(np.setdiff1d(rows, before, assume_unique=True).tolist())
                message.rows_gone.extend(np.setdiff1d(before, rows, assume_unique=True).tolist())
                worker.answered_rows = column
        if len(event.tokens) != len(rows):
            message.num_tokens = len(event.tokens)
        if self._with_tokens:
            message.tokens = to_column(event.tokens)
        if event.counts is not None:
            message.counts.extend(event.counts.tolist())
        if event.draft_counts is not None:
            message.draft_counts.extend(event.draft_counts.tolist())
        if event.failures or event.scores or event.embeddings or event.completed_copies:
            for failure in event.failures:
                message.failures.add(
                    row=failure.row, generation=failure.generation, kind=failure.kind.value, field=failure.field
                )
            for scores in event.scores:
                message.scores.add(
                    row=scores.row,
                    generation=scores.generation,
                    prompt_index=scores.prompt_index,
                    size=len(scores.scores),
                )
            for each in event.embeddings:
                message.embeddings.add(row=each.row, generation=each.generation, size=len(each.values))
            message.copies.extend(event.completed_copies)
        if event.copied_blocks:
            message.copied_blocks = event.copied_blocks
        if event.copy_s:
            message.copy_ns = round(event.copy_s * NS)
            if message.copy_ns / NS != event.copy_s:
                message.copy_s = event.copy_s
        if event.idle_s:
            message.idle_ns = round(event.idle_s * NS)
            if message.idle_ns / NS != event.idle_s:
                message.idle_s = event.idle_s
        if timings is not None:
            _add_timings(message.timings, worker, timings)

    def _hello(self, message: pb.WorkerHello, peer: Peer, event: ev.WorkerHello) -> None:
        values = dataclasses.asdict(event) | {"reason": event.reason.name}
        del values["worker"]
        message.worker, message.worker_id, message.values = self._peer(peer), event.worker_id, json.dumps(values)

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
        if key not in self._live:  # of a request that is submitted twice, the core keeps the first
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
        message.model, message.traceparent = spec.model, spec.traceparent
        message.identity, message.resume_size = self._tagger.tag(spec.identity), len(spec.resume_info)

    def _ended(self, message: pb.RequestEnded, end: RequestEnded) -> None:
        _fill(message, self._peer(end.frontend), end.stream)
        message.reason, message.completion_tokens = end.reason.value, end.completion_tokens
        message.cached_prompt_tokens, message.preemptions = end.cached_prompt_tokens, end.preemptions
        message.queued_s = end.queued_s


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


def _add_timings(message: pb.Timings, worker: _WorkerState, timings: plan_pb2.StepTimings) -> None:
    (
        message.received_delta_us,
        message.started_us,
        message.prepare_us,
        message.forward_us,
        message.sample_us,
        message.num_tokens,
    ) = _timed(worker, timings)


def _timed(worker: _WorkerState, timings: plan_pb2.StepTimings) -> tuple[int, int, int, int, int, int]:
    """Return the fields of `Timings`."""
    received, started = timings.received_unix_ns // 1000, timings.started_unix_ns // 1000
    before, worker.received_us = worker.received_us, received
    return (
        received - before,
        started - received,
        timings.prepare_ns // 1000,
        timings.forward_ns // 1000,
        timings.sample_ns // 1000,
        timings.num_tokens,
    )


def _differences(values: IndexArray) -> bytes:
    """Return the column of the first value, and of the difference of every other one to the value before it."""
    column = values.astype(np.int32)
    column[1:] -= values[:-1]
    return column.tobytes()


def _about(spec: pb.Spec) -> About:
    return About(spec.request_id, spec.tenant, spec.num_prompt_tokens, spec.max_tokens, spec.traceparent)


def _add_copies(into: Any, copies: Sequence[BlockCopy]) -> None:
    for copy in copies:
        into.add(copy_id=copy.copy_id, sources=_differences(copy.sources), targets=_differences(copy.targets))
