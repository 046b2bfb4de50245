"""What the next step of a worker holds.

One token budget per step (Sarathi-Serve, OSDI 2024): every decode row that can go on gets one token, prompts under way
take what is left in chunks (`chunks`), in order of arrival, and then waiting requests are admitted while rows, blocks
and budget last (iteration-level batching, Orca, OSDI 2022). There are no phases: a prompt's chunks and other rows'
decodes share a step.

A decode row is *held out* of a step, not failed, when its reader's credit is used up or when it needs a block and none
is free (`growth`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.admission import Admission, Refusal, victims_for_urgent
from scheduler_svc.core.arrays import NO_INDICES, ONE, IndexArray, any_of, where
from scheduler_svc.core.chunks import chunk_cost, longest_chunk
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.forecast import Forecast
from scheduler_svc.core.growth import Growth
from scheduler_svc.core.placement import Room
from scheduler_svc.core.plan import Plan, RowAdmission
from scheduler_svc.core.records import Pooling
from scheduler_svc.core.request import Request, RequestState, as_column
from scheduler_svc.core.rows import DECODE
from scheduler_svc.core.swapping import BlockCopy
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.core.worker import StepInFlight, Trial, Worker


@dataclass(slots=True)
class Outcome:
    """What planning did: the plan, if there is one, and what its requests must know."""

    plan: Plan | None
    admitted: list[tuple[Request, int]]
    """Requests that were given a row, and which."""
    preempted: list[Request]
    refused: list[Refusal]
    ending: list[Request]
    """Requests whose last step was planned."""
    starved: list[Request]
    """Waiting requests whose readers have no credit after all."""
    wanted: list[Request]
    """Waiting requests whose grammar the worker is to compile."""


class Planner:
    """Plans one step of one worker; made for one call of `run`."""

    def __init__(
        self,
        worker: Worker,
        fleet: Sequence[Worker],
        waiting: WaitingQueue,
        tenants: Tenants,
        forecast: Forecast,
        config: CoreConfig,
        frontends: dict[bytes, int],
        now: float,
    ) -> None:
        self._worker = worker
        self._fleet = fleet
        self._rows = worker.rows
        self._pool = worker.pool
        self._waiting = waiting
        self._tenants = tenants
        self._swap_ins: list[BlockCopy] = []
        self._copy_sources: list[int] = []
        self._copy_targets: list[int] = []
        self._config = config
        self._frontends = frontends
        self._now = now
        self._budget = min(config.max_num_batched_tokens, worker.max_tokens_per_step)
        self._max_chunk = config.long_prefill_token_threshold or self._budget
        self._growth = Growth(worker, forecast)
        self._chunk_rows: list[int] = []
        self._chunk_lengths: list[int] = []
        self._chunks_cost = 0
        self._admissions: list[RowAdmission] = []
        self._outcome = Outcome(None, [], self._growth.preempted, [], [], [], [])

    def run(self) -> Outcome:
        """Makes the plan and updates rows, pool and queue accordingly."""
        worker = self._worker
        worker.judge()
        if worker.in_flight and worker.in_flight[-1].solo is not None:
            return self._outcome  # nothing else may share the blame, even when its request has left by now
        if (worker.trial is not None or worker.trial_due) and (worker.in_flight or self._try_suspect()):
            return self._outcome
        for row in victims_for_urgent(self._worker, self._waiting, self._config):
            self._growth.preempt(row)
        decodes = self._schedule_decodes()
        self._budget -= len(decodes)
        self._schedule_prefills()
        if not self._growth.out_of_memory:
            self._worker.capacity.went_well()
            self._admit()
        # A worker that will have nothing to do is still told which rows are over.
        idle_leaves = self._worker.pending_leaves and not self._worker.in_flight
        if len(decodes) or self._chunk_rows or self._growth.swap_outs or idle_leaves:
            self._outcome.plan = self._issue(decodes)
        elif worker.trial_due and not worker.in_flight:
            self._try_suspect()
        return self._outcome

    def _try_suspect(self) -> bool:
        """Makes a plan for a suspect alone, if there is one to try."""
        decodes = self._schedule_trial()
        if self._worker.trial is None:
            return False
        self._outcome.plan = self._issue(decodes)
        return True

    def _schedule_trial(self) -> IndexArray:
        """A step for a suspect alone: one under way goes on, or the next one is admitted. Returns the decode rows."""
        worker, rows = self._worker, self._rows
        worker.trial_due = False
        if worker.trial is None:
            self._account_service()
            admission = Admission(worker, self._fleet, self._waiting, self._tenants, self._config, self._now)
            suspect = admission.next_suspect()
            if suspect is not None:
                placed = self._place(*suspect)
                self._admissions.append(placed)
                request = suspect[0]
                worker.trial = Trial(request, placed.row, placed.generation, request.num_generated)
            admission.close()
            return NO_INDICES
        row = worker.trial.row
        if rows.state[row] != DECODE:
            self._add_chunk(row)
            return NO_INDICES
        alone = np.array([row], np.intp)
        if rows.length[row] < rows.allowed[row] and rows.length[row] > rows.capacity[row] and self._pool.num_available:
            self._growth.append(alone)
        if rows.length[row] < rows.allowed[row] and rows.length[row] <= rows.capacity[row]:
            return alone
        worker.end_trial()
        return NO_INDICES

    def _schedule_decodes(self) -> IndexArray:
        """The decode rows that take part, ascending; gives blocks to those that need one."""
        rows = self._rows
        candidates = rows.decoding
        length = rows.length[candidates]
        without_credit = length >= rows.allowed[candidates]
        without_block = length > rows.capacity[candidates]
        starved = any_of(without_credit)
        if starved:
            without_block &= ~without_credit
        if any_of(without_block):
            needy = candidates[without_block]
            if len(needy) > self._pool.num_available:
                self._growth.append_by_rank(needy)
                has_block = (rows.state[candidates] == DECODE) & (length <= rows.capacity[candidates])
                takes_part: IndexArray = candidates[has_block & ~without_credit]
                return takes_part
            self._growth.append(needy)
        return candidates[~without_credit] if starved else candidates

    def _schedule_prefills(self) -> None:
        rows = self._rows
        for row in self._worker.prefilling:
            if self._budget == 0:
                return
            if rows.length[row] < rows.allowed[row]:
                self._add_chunk(row)

    def _add_chunk(self, row: int) -> None:
        computed = self._rows.computed.item(row)
        break_even = self._worker.model.break_even_context
        affordable = longest_chunk(self._budget, computed, break_even)
        chunk = min(self._rows.length.item(row) - computed, affordable, self._max_chunk)
        # What is left when the budget ends a chunk would not pay for this prompt's next token.
        cost = self._budget if chunk == affordable else chunk_cost(chunk, computed, break_even)
        self._chunk_rows.append(row)
        self._chunk_lengths.append(chunk)
        self._chunks_cost += cost
        self._budget -= cost
        self._worker.publish_blocks(row, computed + chunk)

    def _admit(self) -> None:
        """Takes waiting requests in while the budget lasts."""
        if not len(self._waiting):
            return
        self._account_service()
        admission = Admission(self._worker, self._fleet, self._waiting, self._tenants, self._config, self._now)
        while self._budget and (admitted := admission.next()) is not None:
            self._admissions.append(self._place(*admitted))
        admission.close()
        self._outcome.refused = admission.refused
        self._outcome.starved = admission.starved
        self._outcome.wanted = admission.wanted

    def _account_service(self) -> None:
        """Brings the queue's view of service up to date before it chooses."""
        if not self._waiting.accounts_service:
            return
        for account, num_tokens in self._rows.charge():
            self._waiting.served(account, output_tokens=num_tokens)

    def _place(self, request: Request, room: Room) -> RowAdmission:
        self._pool.share(room.cached)
        num_cached_tokens = len(room.cached) * self._rows.block_size
        if room.partial is not None:
            # The plan being made reads it; and it must not be among the blocks that are taken now.
            source = np.array([room.partial.block], np.intp)
            worker = self._worker
            self._pool.read(source, last_step=worker.last_step + 1, answered_step=worker.answered_step)
            num_cached_tokens += room.partial.num_tokens
        blocks = self._pool.take(room.num_new)
        if len(room.cached):
            blocks = np.concatenate((room.cached, blocks))
        if room.partial is not None:
            self._copy_sources.append(room.partial.block)
            self._copy_targets.append(int(blocks[len(room.cached)]))
        num_computed = num_cached_tokens
        if room.swapped is not None:
            self._swap_ins.append(self._worker.swap.back(room.swapped.host_blocks, blocks))
            num_computed = room.swapped.num_tokens
            self._worker.release_swapped(request, last_step=self._worker.last_step + 1)
        request.limit = min(request.limit, self._worker.max_model_len)
        row = self._rows.occupy(
            request,
            frontend_index=self._frontends[request.key.frontend],
            blocks=blocks,
            num_computed=num_computed,
            num_published=len(room.cached),
            rank=self._waiting.rank(request),
        )
        self._outcome.admitted.append((request, row))
        self._worker.prefilling.append(row)
        self._add_chunk(row)
        request.state = RequestState.RUNNING
        if request.first_planned is None:
            request.first_planned = self._now
        request.attempts += 1
        request.note(self._now, f"admitted to {self._worker.worker_id} row {row}")
        self._tenants.started(request, self._now)
        if request.attempts == 1:
            request.num_cached_prompt_tokens = min(num_cached_tokens, request.num_prompt_tokens)
            if self._waiting.accounts_service:
                uncached = request.num_prompt_tokens - request.num_cached_prompt_tokens
                self._waiting.served(request.account, prompt_tokens=uncached)
        self._worker.counters.prompt_tokens += len(request.tokens)
        self._worker.counters.cached_tokens += num_cached_tokens
        return RowAdmission(
            row=row,
            generation=self._rows.generation.item(row),
            token_ids=as_column(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed,
            blocks=blocks,
            sampling=request.sampling,
            grammar=request.grammar,
            pooling=request.pooling,
            request_id=request.request_id,
            frontend=request.key.frontend,
            stream=request.key.stream,
            traceparent=request.traceparent,
            attempt=request.attempts - 1,
            queued_since=request.queued_since,
        )

    def _issue(self, decodes: IndexArray) -> Plan:
        worker, rows = self._worker, self._rows
        holds, releases = self._update_held(decodes)
        # Decode rows advance before prefill rows turn into decode rows.
        rows.length[decodes] += ONE
        prefilled, pooled = self._advance_prefills()
        sampling = decodes
        if prefilled:
            sampling = np.concatenate((decodes, np.array(prefilled, np.intp)))
            sampling.sort()
        num_tokens = len(decodes) + sum(self._chunk_lengths)
        cost = len(decodes) + self._chunks_cost
        leaves = worker.pending_leaves
        worker.pending_leaves = []
        worker.last_step += 1
        worker.last_tokens = num_tokens
        worker.in_flight.append(
            StepInFlight(
                step=worker.last_step,
                rows=sampling,
                generations=rows.generation[sampling],
                prefilled=prefilled,
                pooled=[(row, int(rows.generation[row])) for row in pooled],
                num_tokens=num_tokens,
                num_prefill_tokens=num_tokens - len(decodes),
                cost=cost,
                started=self._now,
                successor_due=self._now + worker.clock.lead(cost),
                # Rows that decoded before, and were not held out, could always go on.
                goes_on=bool(worker.in_flight) or len(decodes) > len(releases),
                chunk_rows=self._chunk_rows,
                solo=worker.trial.request if worker.trial is not None else None,
                copy_ids=[copy.copy_id for copy in self._growth.swap_outs + self._swap_ins],
                allowance=worker.clock.deadline(cost),
            )
        )
        worker.counters.steps += 1
        worker.counters.scheduled_tokens += num_tokens
        plan = Plan(
            worker=worker.peer,
            epoch=worker.epoch,
            step=worker.last_step,
            leaves=_indices(leaves),
            admissions=tuple(self._admissions),
            append_rows=_joined(self._growth.appended_rows),
            append_blocks=_joined(self._growth.appended_blocks),
            chunk_rows=_indices(self._chunk_rows),
            chunk_lengths=_indices(self._chunk_lengths),
            holds=holds,
            releases=releases,
            swap_outs=tuple(self._growth.swap_outs),
            swap_ins=tuple(self._swap_ins),
            copy_sources=_indices(self._copy_sources),
            copy_targets=_indices(self._copy_targets),
            num_decodes=len(decodes),
            num_tokens=num_tokens,
            traced_rows=self._traced() if rows.traced else (),
        )
        at_limit = rows.length[sampling] >= rows.limit[sampling]
        for row in (sampling[at_limit].tolist() if any_of(at_limit) else []) + pooled:
            self._retire(row)
        return plan

    def _update_held(self, decodes: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Which rows begin and cease to be held out with this step."""
        rows = self._rows
        if len(decodes) == len(rows.decoding) and not any_of(rows.held):
            return NO_INDICES, NO_INDICES
        held = rows.state == DECODE
        held[decodes] = False
        changed = held != rows.held
        if not any_of(changed):
            return NO_INDICES, NO_INDICES
        rows.held = held
        return (
            where(changed & held),
            where(changed & ~held),
        )

    def _advance_prefills(self) -> tuple[list[int], list[int]]:
        """Counts the chunks as computed. Returns the rows whose prompt is complete: those that have become decode rows,
        and those that pool and have nothing left to do."""
        rows = self._rows
        prefilled: list[int] = []
        pooled: list[int] = []
        for row, chunk in zip(self._chunk_rows, self._chunk_lengths, strict=True):
            computed = rows.computed.item(row) + chunk
            rows.computed[row] = computed
            if computed < rows.length.item(row):
                continue
            request = rows.requests[row]
            assert request is not None
            if request.pooling is not Pooling.NONE:
                pooled.append(row)
                continue
            rows.start_decoding(row)
            self._worker.prefilling.remove(row)
            prefilled.append(row)
        return prefilled, pooled

    def _retire(self, row: int) -> None:
        """A row whose request ends with this step leaves: what it cannot use is not planned."""
        request = self._worker.vacate(row)
        request.state = RequestState.ENDING
        self._outcome.ending.append(request)

    def _traced(self) -> tuple[tuple[bytes, int], ...]:
        """The traced requests that take part, as (front end, stream)."""
        rows = self._rows
        traced = []
        for row in sorted(rows.traced):
            request = rows.requests[row]
            assert request is not None
            decodes = rows.state.item(row) == DECODE and not rows.held.item(row)
            if decodes or row in self._chunk_rows:
                traced.append(request.key)
        return tuple(traced)


def _indices(numbers: list[int]) -> IndexArray:
    return np.array(numbers, np.intp) if numbers else NO_INDICES


def _joined(parts: list[IndexArray]) -> IndexArray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_INDICES
