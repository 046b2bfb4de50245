"""What the next step of a worker holds.

One token budget per step (Sarathi-Serve, OSDI 2024): every decode row that can go on gets one token, prompts under way
take what is left in chunks, in order of arrival, and then waiting requests are admitted while rows, blocks and budget
last (iteration-level batching, Orca, OSDI 2022). There are no phases: a prompt's chunks and other rows' decodes share a
step.

A decode row is *held out* of a step, not failed, when its reader's credit is used up or when it needs a block and none
is free. Blocks that are only waiting for an answer are waited for; when none are coming, the request that arrived last
is preempted: it gives up its blocks, keeps its tokens and its place in the queue, and is computed again later.
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import EndReason
from scheduler_svc.core.events import Int32Array
from scheduler_svc.core.plan import Plan, RowAdmission
from scheduler_svc.core.request import Request, RequestState, as_column
from scheduler_svc.core.rows import DECODE
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import StepInFlight, Worker

MAX_ADMITTED_TOKENS = 1 << 20
"""Bounds a plan in bytes: after a loss many long prompts may come at once."""

_NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A waiting request that this worker could never run."""

    request: Request
    reason: EndReason
    message: str


@dataclass(slots=True)
class Outcome:
    """What planning did: the plan, if there is one, and what its requests must know."""

    plan: Plan | None
    preempted: list[Request]
    refused: list[Refusal]
    ending: list[Request]
    """Requests whose last step was planned."""


class Planner:
    """Plans one step of one worker; made for one call of `run`."""

    def __init__(
        self,
        worker: Worker,
        waiting: WaitingQueue,
        config: CoreConfig,
        frontends: dict[bytes, int],
        now: float,
    ) -> None:
        self._worker = worker
        self._rows = worker.rows
        self._pool = worker.pool
        self._waiting = waiting
        self._config = config
        self._frontends = frontends
        self._now = now
        self._budget = min(config.max_num_batched_tokens, worker.max_tokens_per_step)
        self._append_rows: list[int] = []
        self._append_blocks: list[int] = []
        self._chunk_rows: list[int] = []
        self._chunk_lengths: list[int] = []
        self._admissions: list[RowAdmission] = []
        self._outcome = Outcome(None, [], [], [])

    def run(self) -> Outcome:
        """Makes the plan and updates rows, pool and queue accordingly."""
        decodes = self._schedule_decodes()
        self._budget -= len(decodes)
        self._schedule_prefills()
        if not self._outcome.preempted:
            self._admit()
        if len(decodes) or self._chunk_rows:
            self._outcome.plan = self._issue(decodes)
        return self._outcome

    def _schedule_decodes(self) -> Int32Array:
        """The decode rows that take part, ascending; gives blocks to those that need one."""
        rows = self._rows
        candidates = rows.decoding
        length = rows.length[candidates]
        without_credit = length >= rows.allowed[candidates]
        without_block = length > rows.capacity[candidates]
        starved = without_credit.any()
        if starved:
            without_block &= ~without_credit
        if without_block.any():
            self._give_blocks(candidates[without_block])
            has_block = (rows.state[candidates] == DECODE) & (length <= rows.capacity[candidates])
            candidates = candidates[has_block & ~without_credit]
        elif starved:
            candidates = candidates[~without_credit]
        return candidates

    def _give_blocks(self, rows: Int32Array) -> None:
        if len(rows) <= self._pool.num_free:
            self._append(rows.tolist())
            return
        for row in rows[np.argsort(self._rows.sequence[rows])].tolist():
            if self._rows.state[row] == DECODE and self._make_room_for(row):
                self._append([row])

    def _append(self, rows: list[int]) -> None:
        blocks = self._pool.take(len(rows))
        self._rows.grow(rows, blocks)
        self._append_rows += rows
        self._append_blocks += blocks

    def _make_room_for(self, row: int) -> bool:
        """Sees to a free block for `row`; False when it has to wait for answers or became the victim itself."""
        while not self._pool.num_free:
            if self._pool.num_retired:
                return False
            victim = self._youngest()
            self._outcome.preempted.append(self._worker.vacate(victim))
            self._worker.counters.preemptions += 1
            if victim == row:
                return False
        return True

    def _youngest(self) -> int:
        occupied = np.flatnonzero(self._rows.state)
        return int(occupied[np.argmax(self._rows.sequence[occupied])])

    def _schedule_prefills(self) -> None:
        rows = self._rows
        for row in self._worker.prefilling:
            if self._budget == 0:
                return
            if rows.length[row] < rows.allowed[row]:
                self._add_chunk(row)

    def _add_chunk(self, row: int) -> None:
        chunk = min(int(self._rows.length[row] - self._rows.computed[row]), self._budget)
        self._chunk_rows.append(row)
        self._chunk_lengths.append(chunk)
        self._budget -= chunk

    def _admit(self) -> None:
        worker, rows, pool = self._worker, self._rows, self._pool
        max_running = min(self._config.max_num_seqs, rows.max_rows)
        reserve = int(self._config.watermark * pool.num_blocks) if rows.num_running else 0
        admitted_tokens = 0
        while self._budget and rows.num_running < max_running and admitted_tokens < MAX_ADMITTED_TOKENS:
            request = self._waiting.head()
            if request is None or request.unsettled:
                return
            refusal = _refusal(request, worker)
            if refusal is not None:
                self._waiting.pop()
                self._outcome.refused.append(refusal)
                continue
            num_blocks = -(-len(request.tokens) // rows.block_size)
            if num_blocks + reserve > pool.num_free:
                return
            self._waiting.pop()
            self._admissions.append(self._place(request, pool.take(num_blocks)))
            admitted_tokens += len(request.tokens)
            reserve = int(self._config.watermark * pool.num_blocks)

    def _place(self, request: Request, blocks: list[int]) -> RowAdmission:
        request.limit = min(request.limit, self._worker.max_model_len)
        row = self._rows.occupy(request, self._frontends[request.key.frontend], blocks)
        self._worker.prefilling.append(row)
        self._add_chunk(row)
        request.state = RequestState.RUNNING
        if request.first_planned is None:
            request.first_planned = self._now
        request.attempts += 1
        request.note(self._now, f"admitted to {self._worker.worker_id} row {row}")
        return RowAdmission(
            row=row,
            generation=int(self._rows.generation[row]),
            token_ids=as_column(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            blocks=tuple(blocks),
            sampling=request.sampling,
            request_id=request.request_id,
            frontend=request.key.frontend,
            stream=request.key.stream,
            traceparent=request.traceparent,
            attempt=request.attempts - 1,
            queued_since=request.queued_since,
        )

    def _issue(self, decodes: Int32Array) -> Plan:
        worker, rows = self._worker, self._rows
        holds, releases = self._update_held(decodes)
        # Decode rows advance before prefill rows turn into decode rows.
        rows.length[decodes] += 1
        prefilled = self._advance_prefills()
        sampling = decodes
        if prefilled:
            sampling = np.concatenate((decodes, np.array(prefilled, np.int32)))
            sampling.sort()
        num_tokens = len(decodes) + sum(self._chunk_lengths)
        leaves = worker.pending_leaves
        worker.pending_leaves = []
        worker.last_step += 1
        worker.last_tokens = num_tokens
        deadline = worker.clock.deadline(num_tokens)
        if worker.in_flight:
            deadline += worker.in_flight[-1].deadline - self._now
        worker.in_flight.append(
            StepInFlight(
                step=worker.last_step,
                rows=sampling,
                generations=rows.generation[sampling],
                prefilled=prefilled,
                num_tokens=num_tokens,
                started=self._now,
                deadline=self._now + deadline,
            )
        )
        worker.counters.steps += 1
        worker.counters.scheduled_tokens += num_tokens
        plan = Plan(
            worker=worker.peer,
            epoch=worker.epoch,
            step=worker.last_step,
            leaves=np.array(leaves, np.int32) if leaves else _NO_ROWS,
            admissions=tuple(self._admissions),
            append_rows=np.array(self._append_rows, np.int32) if self._append_rows else _NO_ROWS,
            append_blocks=np.array(self._append_blocks, np.int32) if self._append_rows else _NO_ROWS,
            chunk_rows=np.array(self._chunk_rows, np.int32) if self._chunk_rows else _NO_ROWS,
            chunk_lengths=np.array(self._chunk_lengths, np.int32) if self._chunk_rows else _NO_ROWS,
            holds=holds,
            releases=releases,
            num_decodes=len(decodes),
            num_tokens=num_tokens,
            traced_rows=self._traced(decodes),
        )
        self._retire_certain_ends(sampling)
        return plan

    def _update_held(self, decodes: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Which rows begin and cease to be held out with this step."""
        rows = self._rows
        if len(decodes) == len(rows.decoding) and not rows.held.any():
            return _NO_ROWS, _NO_ROWS
        held = rows.state == DECODE
        held[decodes] = False
        changed = held != rows.held
        if not changed.any():
            return _NO_ROWS, _NO_ROWS
        rows.held = held
        return (
            np.flatnonzero(changed & held).astype(np.int32),
            np.flatnonzero(changed & ~held).astype(np.int32),
        )

    def _advance_prefills(self) -> list[int]:
        """Counts the chunks as computed; rows whose prompt is complete become decode rows. Returns those."""
        rows = self._rows
        prefilled: list[int] = []
        for row, chunk in zip(self._chunk_rows, self._chunk_lengths, strict=True):
            rows.computed[row] += chunk
            if rows.computed[row] == rows.length[row]:
                rows.start_decoding(row)
                self._worker.prefilling.remove(row)
                prefilled.append(row)
        return prefilled

    def _retire_certain_ends(self, sampling: Int32Array) -> None:
        """Rows that reach their limit in this step leave: what they cannot use is not planned."""
        rows = self._rows
        for row in sampling[rows.length[sampling] >= rows.limit[sampling]].tolist():
            request = self._worker.vacate(row)
            request.state = RequestState.ENDING
            self._outcome.ending.append(request)

    def _traced(self, decodes: Int32Array) -> tuple[tuple[bytes, int], ...]:
        traced = self._rows.traced
        if not traced:
            return ()
        takes_part = traced.intersection(self._chunk_rows).union(traced.intersection(decodes.tolist()))
        requests = (self._rows.requests[row] for row in sorted(takes_part))
        return tuple((r.key.frontend, r.key.stream) for r in requests if r is not None)


def _refusal(request: Request, worker: Worker) -> Refusal | None:
    num_tokens = len(request.tokens)
    if num_tokens >= worker.max_model_len:
        return Refusal(
            request,
            EndReason.INVALID,
            f"the prompt has {num_tokens} tokens, the served model takes at most {worker.max_model_len - 1}",
        )
    highest = max(request.tokens)
    if highest >= worker.model.vocab_size or min(request.tokens) < 0:
        return Refusal(
            request,
            EndReason.INVALID,
            f"token ids must lie in [0, {worker.model.vocab_size}), found {highest}",
        )
    return None
