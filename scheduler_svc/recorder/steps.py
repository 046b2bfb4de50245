"""Encoding of plans and step results in a record, as deltas from the previous ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from protos.quire.record.v1 import record_pb2 as pb
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.plan import BlockCopy, Plan
from scheduler_svc.core.interface.records import Peer
from shared.columns import from_column, to_column

NS = 1e9


@dataclass(slots=True)
class Row:
    """The request in a row of a worker."""

    generation: int
    frontend: Peer
    stream: int
    prefill_left: int
    held: bool = False


@dataclass(slots=True)
class WorkerState:
    """A worker's state after its last plan and result."""

    hello: ev.WorkerHello
    epoch: int = 0
    last_step: int = 0
    answered_step: int = 0
    num_decodes: int = 0
    answered_rows: bytes = b""
    """Row column of its last result."""
    received_us: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    obstacle: str = ""
    """Reason in its last queue note; empty for none."""
    is_gone: bool = False
    """Whether the core has dropped it. Late messages may still arrive."""


def write_plan(message: pb.Plan, plan: Plan, worker: WorkerState, number_of: Callable[[Peer], int]) -> None:
    """Write a plan as deltas from the worker's previous plan.

    Args:
        message: the message; its worker is set.
        plan: the plan.
        worker: the state of the worker, which is changed by the plan.
        number_of: returns the number of a peer in the segment.
    """
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
        recorded = message.admissions.add(
            row=admission.row,
            generation=admission.generation,
            frontend=number_of(admission.frontend),
            stream=admission.stream,
            num_tokens=num_tokens,
            num_computed=admission.num_computed_tokens,
            attempt=admission.attempt,
            blocks=_differences(admission.blocks),
        )
        if admission.checkpoint is not None:
            recorded.checkpoint = admission.checkpoint
        if admission.windows is not None:
            recorded.window_tables = _differences(admission.windows.tables.ravel())
            recorded.window_first, recorded.window_period = admission.windows.first, admission.windows.period
        rows[admission.row] = Row(
            admission.generation, admission.frontend, admission.stream, num_tokens - admission.num_computed_tokens
        )
    if len(plan.append_rows):
        message.append_rows = to_column(plan.append_rows)
        message.append_blocks = _differences(plan.append_blocks)
        if len(plan.append_windows):
            message.append_windows = _differences(plan.append_windows.ravel())
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
    if len(plan.save_rows):
        message.save_rows.extend(plan.save_rows.tolist())
        message.save_lengths.extend(plan.save_lengths.tolist())
        message.save_checkpoints.extend(plan.save_checkpoints.tolist())
    if len(plan.kept_checkpoints):
        message.kept_checkpoints.extend(plan.kept_checkpoints.tolist())
        message.kept_places.extend(plan.kept_places.tolist())


def write_answer(
    message: pb.StepDone,
    answer: ev.StepDone,
    timings: plan_pb2.StepTimings | None,
    worker: WorkerState,
    *,
    with_tokens: bool,
) -> None:
    """Write a result as deltas from the worker's previous result.

    Args:
        message: the message; its worker is set.
        answer: the result.
        timings: the timings of the step, if known.
        worker: the state of the worker, which is changed by the answer.
        with_tokens: whether the record holds tokens.
    """
    message.SetInParent()
    if answer.epoch != worker.epoch:
        message.epoch = answer.epoch
    if answer.step != worker.answered_step + 1:
        message.step_jump = answer.step - worker.answered_step - 1
    worker.answered_step = answer.step
    rows, column = answer.rows, answer.rows.tobytes()
    if column != worker.answered_rows:
        before = from_column(worker.answered_rows)
        if len(rows) > 1 and not (rows[1:] > rows[:-1]).all():
            message.rows.extend(rows.tolist())
        else:
            message.rows_added.extend(np.setdiff1d(rows, before, assume_unique=True).tolist())
            message.rows_gone.extend(np.setdiff1d(before, rows, assume_unique=True).tolist())
            worker.answered_rows = column
    if len(answer.tokens) != len(rows):
        message.num_tokens = len(answer.tokens)
    if with_tokens:
        message.tokens = to_column(answer.tokens)
    if answer.counts is not None:
        message.counts.extend(answer.counts.tolist())
    if answer.draft_counts is not None:
        message.draft_counts.extend(answer.draft_counts.tolist())
    if answer.failures or answer.scores or answer.embeddings or answer.completed_copies:
        for failure in answer.failures:
            message.failures.add(
                row=_signed(failure.row),
                generation=_signed(failure.generation),
                kind=failure.kind.value,
                field=failure.field,
            )
        for scores in answer.scores:
            message.scores.add(
                row=_signed(scores.row),
                generation=_signed(scores.generation),
                prompt_index=scores.prompt_index,
                size=len(scores.scores),
            )
        for each in answer.embeddings:
            message.embeddings.add(row=_signed(each.row), generation=_signed(each.generation), size=len(each.values))
        message.copies.extend(answer.completed_copies)
    if answer.copied_blocks:
        message.copied_blocks = answer.copied_blocks
    if answer.copy_s:
        message.copy_ns = round(answer.copy_s * NS)
        if message.copy_ns / NS != answer.copy_s:
            message.copy_s = answer.copy_s
    if answer.copy_delay_s != answer.copy_s:
        message.copy_delay_ns = round(answer.copy_delay_s * NS)
        if message.copy_delay_ns / NS != answer.copy_delay_s:
            message.copy_delay_s = answer.copy_delay_s
    if answer.idle_s:
        message.idle_ns = round(answer.idle_s * NS)
        if message.idle_ns / NS != answer.idle_s:
            message.idle_s = answer.idle_s
    if timings is not None:
        _add_timings(message.timings, worker, timings)


def _add_timings(message: pb.Timings, worker: WorkerState, timings: plan_pb2.StepTimings) -> None:
    received, started = timings.received_unix_ns // 1000, timings.started_unix_ns // 1000
    message.received_delta_us, worker.received_us = received - worker.received_us, received
    message.started_us = started - received
    message.prepare_us = timings.prepare_ns // 1000
    message.forward_us = timings.forward_ns // 1000
    message.sample_us = timings.sample_ns // 1000
    message.num_tokens = timings.num_tokens


def _differences(values: IndexArray) -> bytes:
    """Return a column of the first value, followed by the differences between consecutive values."""
    column = values.astype(np.int32)
    column[1:] -= values[:-1]
    return column.tobytes()


def _add_copies(into: Any, copies: Sequence[BlockCopy]) -> None:
    for copy in copies:
        into.add(copy_id=copy.copy_id, sources=_differences(copy.sources), targets=_differences(copy.targets))


def _signed(number: int) -> int:
    """Return a row or a generation as a signed 32-bit number, because a faulty worker may send any 32 bits."""
    return number - (1 << 32) if number >= 1 << 31 else number
