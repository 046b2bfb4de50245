"""Plans one worker's next step.

A step has one token budget (Sarathi-Serve, OSDI 2024), spent in this order:

* Every decode row that can continue gets one token, plus the drafts that it may verify (`speculation`).
* Prompts get chunks (`prompt_chunks`): first the shortest prompts, up to a part of the remaining budget, then all
  prompts in policy order. Chunks leave part of the budget unused if the step would otherwise exceed its target time
  (`chunks`).
* Waiting requests are admitted in their turn while rows, blocks and budget last (iteration-level batching, Orca, OSDI
  2022).

There are no phases: a step may contain prompt chunks and decodes.

A decode row is *held out* of a step when its credit is used up, or when it needs a block and none is free
(`block_allocation`). The row continues later. If another request lacks only a row, a request whose client does not read
loses its row. It continues when its client reads again.

The planner changes only its worker's rows and blocks, and takes requests from the backlog. It does not write request
states (see `states`) or apply results (see `results`). It may assign a request to another worker, which considers it in
its own next plan (see `placement`).
"""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.interface.arrays import NO_INDICES, ONE, IndexArray, Int32Array, all_of, any_of, where
from scheduler_svc.core.interface.config import PREEMPTIVE_POLICIES, CoreConfig
from scheduler_svc.core.interface.plan import BlockCopy, Plan, RowAdmission
from scheduler_svc.core.interface.records import NoteKind, WaitReason
from scheduler_svc.core.planning.batch_selection import Admission, Refusal, victim_for_tenant, victims_for_urgent
from scheduler_svc.core.planning.block_allocation import BlockAllocation, Preemption
from scheduler_svc.core.planning.host_copies import HostCopies
from scheduler_svc.core.planning.prompt_chunks import StepChunks, short_part
from scheduler_svc.core.planning.state_saves import kept_states, save_states
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.placement import Placement, Room
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request, as_column
from scheduler_svc.core.workers.cost_model import StepShape
from scheduler_svc.core.workers.rows import DECODE
from scheduler_svc.core.workers.speculation import fitting
from scheduler_svc.core.workers.steps_in_flight import StepInFlight
from scheduler_svc.core.workers.worker import Worker
from shared.request_spec import Pooling


@dataclass(slots=True)
class Outcome:
    """Result of planning: the plan, if there is one, and the changes for the requests."""

    plan: Plan | None
    admitted: list[tuple[Request, RowAdmission]]
    """Admitted requests, in order."""
    preempted: list[Preemption]
    refused: list[Refusal]
    ending: list[int]
    """Rows whose last step was planned. `Scheduler.tidy` vacates them after the plan was sent."""
    starved: list[Request]
    """Waiting requests that no longer have credit."""
    stranded: list[Request]
    """Waiting requests that no worker of the fleet can serve."""
    wanted: list[Request]
    """Waiting requests whose grammar the worker must compile."""
    obstacle: WaitReason | None = None
    """Why the requests that still compete for the worker were not admitted."""


class Planner:
    """Plans one step for one worker. Use each object for one call to `run`."""

    def __init__(
        self,
        worker: Worker,
        backlog: Backlog,
        placement: Placement | None,
        tenants: Tenants,
        forecast: Forecast,
        config: CoreConfig,
        frontends: dict[bytes, int],
        num_queued: int,
        queued_tokens: int,
        now: float,
    ) -> None:
        self._worker = worker
        self._rows = worker.rows
        self._pool = worker.pool
        self._backlog = backlog
        self._policy = backlog.policy
        self._placement = placement
        self._tenants = tenants
        self._forecast = forecast
        self._swap_ins: list[BlockCopy] = []
        self._copy_sources: list[int] = []
        self._copy_targets: list[int] = []
        self._config = config
        self._frontends = frontends
        self._num_queued, self._queued_tokens = num_queued, queued_tokens
        """The worker's share of the waiting requests and their tokens."""
        self._now = now
        budget = min(config.max_num_batched_tokens, worker.max_tokens_per_step)
        self._chunks = StepChunks(worker, budget, config.long_prefill_token_threshold or budget)
        self._max_rows = min(config.max_num_seqs, worker.rows.max_rows)
        self._allocation = BlockAllocation(worker)
        self._copies = HostCopies(worker, self._chunks) if worker.swap.caches else None
        self._decodes = NO_INDICES
        """The decode rows of the step."""
        self._is_limited = False
        """Whether the step's target limits the chunk budget."""
        self._num_drafts = 0
        """Maximum number of drafts in the step."""
        self._draft_limits: tuple[IndexArray, Int32Array] | None = None
        """Decode rows and their draft limits from this step on; None if unchanged."""
        self._newly_held: list[int] = []
        """Rows that are paused from this plan on."""
        self._outcome = Outcome(None, [], self._allocation.preempted, [], [], [], [], [])

    def run(self) -> Outcome:
        """Make the plan, and update rows, pool and queue accordingly."""
        self._run()
        if self._copies is not None and self._outcome.plan is None:
            self._copies.cancel()
        return self._outcome

    def _run(self) -> None:
        worker = self._worker
        worker.trials.judge(in_flight=bool(worker.in_flight))
        if worker.in_flight and worker.in_flight[-1].solo is not None:
            self._note_obstacle(WaitReason.ALONE)
            return  # A trial step contains no other request, even after the suspect has left.
        if (worker.trials.running is not None or worker.trials.is_due) and (worker.in_flight or self._try_suspect()):
            self._note_obstacle(WaitReason.ALONE)
            return
        for choose in (victims_for_urgent, victim_for_tenant):
            urgent, victims = choose(worker, self._backlog, self._placement, self._tenants, self._config, self._now)
            for row in victims:
                assert urgent is not None
                self._allocation.preempt(row, urgent)
        decodes = self._schedule_decodes()
        self._spend_decodes(decodes)
        under_way = self._prompts_under_way()
        if self._allocation.out_of_memory:
            self._share(under_way, None)
            self._note_obstacle(WaitReason.MEMORY)
        elif not self._backlog.has_for(worker):
            self._share(under_way, None)
        else:
            worker.capacity.is_growing = bool(len(decodes) or under_way or worker.in_flight)
            self._admit(under_way)
        # A worker without further work still needs a plan that lists the ended rows.
        idle_leaves = self._worker.pending_leaves and not self._worker.in_flight
        copies = self._allocation.swap_outs or (self._copies is not None and self._copies.ins)
        if len(decodes) or self._chunks or copies or idle_leaves:
            self._outcome.plan = self._issue(decodes)
        elif worker.trials.is_due and not worker.in_flight:
            self._try_suspect()

    def _try_suspect(self) -> bool:
        """Plan a step for a suspect alone; return False if no suspect can be tried."""
        decodes = self._schedule_trial()
        if self._worker.trials.running is None:
            return False
        self._outcome.plan = self._issue(decodes)
        return True

    def _schedule_trial(self) -> IndexArray:
        """Continue the suspect request's trial, or admit the next suspect; return the step's decode rows."""
        worker, rows = self._worker, self._rows
        worker.trials.is_due = False
        self._spend_decodes(NO_INDICES)
        if worker.trials.running is None:
            admission = Admission(worker, self._backlog, self._placement, self._tenants, self._config, self._now)
            suspect = admission.next_suspect()
            if suspect is not None:
                placed = self._place(*suspect)
                self._outcome.admitted.append((suspect[0], placed))
                self._add_chunk(placed.row)
                worker.trials.begin(suspect[0], placed.row)
            self._close(admission)
            return NO_INDICES
        row = worker.trials.running.row
        if rows.state[row] != DECODE:
            self._add_chunk(row)
            return NO_INDICES
        alone = np.array([row], np.intp)
        if worker.speculation.max_drafts:
            self._draft_limits = alone, np.zeros(1, np.int32)
        if rows.length[row] > rows.capacity[row] and worker.num_growth(alone) <= self._pool.num_available:
            self._allocation.append(alone)
        if rows.length[row] <= rows.capacity[row]:
            return alone
        worker.trials.end()
        return NO_INDICES

    def _schedule_decodes(self) -> IndexArray:
        """Return the step's decode rows, ascending; give a block to each row that needs one."""
        worker, rows = self._worker, self._rows
        candidates = rows.decoding
        if worker.speculation.max_drafts and len(candidates):
            limits = worker.speculation.limits(rows, candidates)
            if limits is not None or any(step.draft_limits is not None for step in worker.in_flight):
                return self._schedule_drafts(limits)
        length = rows.length[candidates]
        without_credit = length >= rows.allowed[candidates]
        without_block = length > rows.capacity[candidates]
        starved = any_of(without_credit)
        if starved:
            self._worker.starves = True
            self._note_held(candidates[without_credit], WaitReason.CREDIT)
            without_block &= ~without_credit
        if any_of(without_block):
            needy = candidates[without_block]
            if worker.num_growth(needy) > self._pool.num_available:
                self._allocation.append_by_rank(needy)
                decodes = rows.state[candidates] == DECODE
                has_block = decodes & (length <= rows.capacity[candidates])
                self._note_held(candidates[decodes & ~has_block & ~without_credit], WaitReason.MEMORY)
                active: IndexArray = candidates[has_block & ~without_credit]
                return active
            self._allocation.append(needy)
        return candidates[~without_credit] if starved else candidates

    def _schedule_drafts(self, limits: Int32Array | None) -> IndexArray:
        """Like `_schedule_decodes`, while rows have draft limits or drafts in flight; also set the limits.

        A row needs a block for its next token even if all drafts in flight are accepted. It gets blocks for this step's
        drafts only while many are available. Drafts preempt no request. When memory is short, all limits become 0, and
        a row waits for results if its steps in flight may fill its blocks.
        """
        rows, pool, worker = self._rows, self._pool, self._worker
        candidates = rows.decoding
        num_candidates = len(candidates)
        if limits is None:
            limits = np.zeros(num_candidates, np.int32)
        else:
            # With recurrent state, rows may also compute rejected steps again, and other rows may begin to decode then.
            num_rows = self._max_rows if worker.model.state_bytes else num_candidates
            spare = max(0, self._chunks.budget - num_rows)
            last = rows.last_limit[candidates]
            limits = fitting(limits, spare // 2 if worker.prefilling or self._backlog.has_for(worker) else spare)
            if int(np.maximum(limits, last).sum()) > spare:
                limits = np.minimum(limits, last) if worker.model.state_bytes else limits
        reach, most = rows.reach(candidates), rows.limit[candidates] - ONE
        room = rows.allowed[candidates] - reach
        limits = np.where(limits < room, limits, np.int32(0))
        # A row generates one token besides its drafts, but never exceeds its limit.
        limits = np.minimum(limits, np.maximum(most - reach, np.int32(0)))
        has_credit = room > 0
        if not all_of(has_credit):
            worker.starves = True
            self._note_held(candidates[~has_credit], WaitReason.CREDIT)
        # A row waits if it may already have ended, by reaching its limit or by filling its blocks up to the limit.
        goes_on = has_credit & (reach <= rows.limit[candidates])
        needy = goes_on & (reach > rows.capacity[candidates]) & (rows.capacity[candidates] < most)
        if any_of(needy):
            if worker.num_growth(candidates[needy]) <= pool.num_available:
                self._allocation.append(candidates[needy])
            else:
                limits = np.zeros(num_candidates, np.int32)
                certain = candidates[needy & (rows.length[candidates] > rows.capacity[candidates])]
                if len(certain):
                    self._allocation.append_by_rank(certain)
                still = needy & (rows.state[candidates] == DECODE) & (reach > rows.capacity[candidates])
                self._note_held(candidates[still], WaitReason.MEMORY)
        active = goes_on & (rows.state[candidates] == DECODE) & (reach <= rows.capacity[candidates])
        self._draft_limits = candidates, limits
        wanted = np.minimum(reach + limits, most)
        for _ in range(worker.speculation.max_drafts):
            short = candidates[active & (wanted > rows.capacity[candidates])]
            if not len(short) or worker.num_growth(short) + num_candidates > pool.num_available:
                break
            self._allocation.append(short)
        self._num_drafts = int(limits[active].sum())
        decodes: IndexArray = candidates if all_of(active) else candidates[active]
        return decodes

    def _note_held(self, held: IndexArray, reason: WaitReason) -> None:
        """Record why rows are held out, once per row until the row gets credit or a block."""
        new = held[~self._rows.hold_noted[held]]
        for row in new.tolist():
            request = self._rows.requests[row]
            assert request is not None
            request.note(self._now, NoteKind.HELD, reason.value)
        self._rows.hold_noted[new] = True
        self._newly_held += new.tolist()

    def _spend_decodes(self, decodes: IndexArray) -> None:
        """Take the tokens of decode rows from the budget."""
        self._decodes = decodes
        self._chunks.budget -= len(decodes) + self._num_drafts + self._num_repeated(decodes)

    def _num_repeated(self, decodes: IndexArray) -> int:
        """Return the most tokens that rows compute again after rejected drafts, beyond the drafts in this step.

        Rows that compute tokens again have no drafts.
        """
        rows, worker = self._rows, self._worker
        if not worker.model.state_bytes or not worker.speculation.max_drafts:
            return 0
        limits = rows.draft_limit
        if self._draft_limits is not None:
            limits = limits.copy()
            limits[self._draft_limits[0]] = self._draft_limits[1]
        return int(np.maximum(rows.last_limit[decodes] - limits[decodes], 0).sum())

    def _limit_chunks(self) -> None:
        """Limit the remaining budget to what the step's target allows."""
        if self._is_limited:
            return
        self._is_limited = True
        decodes, target_s = self._decodes, self._config.itl_target_s
        if not target_s:
            return
        shape = StepShape(len(decodes), 0, int(self._rows.length[decodes].sum()), self._num_drafts)
        costs = self._worker.costs
        num_prompts = self._num_queued + len(self._worker.prefilling)
        for_chunks = self._worker.pace.chunk_budget(costs, target_s, shape, num_prompts, self._prompt_tokens_here())
        if for_chunks is not None:
            # These requests were decode rows of the earlier scheduler's steps. Only their last block lacks KV.
            home = self._backlog.num_coming_home(self._worker) * self._rows.block_size
            self._chunks.limit(for_chunks + home)

    def _prompt_tokens_here(self) -> int:
        """Return the uncached prompt tokens of all requests that wait or are in prefill here."""
        rows, under_way = self._rows, self._worker.prefilling
        uncached = rows.length[under_way] - rows.shared[under_way] * rows.block_size
        return self._queued_tokens + int(uncached.sum())

    def _prompts_under_way(self) -> list[int]:
        """Return the rows in prefill that have credit, in order of admission."""
        rows = self._rows
        return [row for row in self._worker.prefilling if rows.length[row] < rows.allowed[row]]

    def _add_chunk(self, row: int, most: int | None = None) -> int:
        """Compute more of a row's prompt in this step; return the used budget tokens."""
        self._limit_chunks()
        return self._chunks.add(row, most)

    def _share(self, under_way: list[int], admission: Admission | None) -> None:
        """Share the chunk budget among started prompts and waiting requests, without the part left for admissions.

        Args:
            under_way: rows in prefill whose readers have credit.
            admission: this plan's admissions; None if no request can be admitted.
        """
        if admission is None and len(under_way) <= 1:
            for row in under_way:
                self._add_chunk(row)
            return
        if self._config.serves_short_first and (under_way or self._has_row()):
            self._share_short_part(under_way, admission)
            under_way = self._prompts_under_way()
        by_key = self._policy.has_keys
        if by_key:
            under_way.sort(key=self._place_of)
        for row in under_way:
            if not self._chunks.budget:
                return
            if admission is not None and by_key:
                self._admit_ahead(admission, self._place_of(row))
            self._add_chunk(row)

    def _share_short_part(self, under_way: list[int], admission: Admission | None) -> None:
        """Spend the short part on the prompts with the fewest tokens left."""
        self._limit_chunks()
        left = short_part(self._chunks.budget, self._worker.last_step, first_is_late=self._first_is_late(under_way))
        rows = self._rows
        longest_first = sorted(
            under_way, key=lambda row: (-self._chunks.rest(row), -rows.rank.item(row), -rows.sequence.item(row))
        )
        while left > 0:
            rest = self._chunks.rest(longest_first[-1]) if longest_first else None
            if admission is not None:
                before = self._chunks.budget
                admitted = admission.next_short(rest)
                left -= before - self._chunks.budget  # What its copies to the device take.
                cost = 0 if admitted is None else self._admitted(*admitted, most=max(1, left))
                if cost:
                    left -= cost
                    continue
                admission = None
            if not longest_first:
                return
            cost = self._add_chunk(longest_first.pop(), most=left)
            if not cost:
                return  # The remaining budget is too small for even one token of the shortest prompt.
            left -= cost

    def _first_is_late(self, under_way: list[int]) -> bool:
        """Return whether the first started prompt in the order has missed the target for its first token.

        Under `priority` and `edf` it is urgent all the same.
        """
        config = self._config
        if not under_way or not self._policy.has_keys or config.policy in PREEMPTIVE_POLICIES:
            return False
        first = self._rows.requests[min(under_way, key=self._place_of)]
        assert first is not None
        return not first.num_generated and self._now > first.first_token_due(config.slo_ttft_s, config.slo_ttft_token_s)

    def _admit(self, under_way: list[int]) -> None:
        """Share the chunk budget, and admit waiting requests while it lasts."""
        if not self._worker.draining:
            self._backlog.prepare(self._worker, max(0, self._max_rows - self._rows.num_running), self._now)
        admission = Admission(
            self._worker, self._backlog, self._placement, self._tenants, self._config, self._now, self._copies
        )
        if self._worker.swap.keys:
            self._limit_chunks()  # Copies of cached blocks take a part of the limited budget.
        self._share(under_way, admission)
        while self._chunks.budget and (admitted := admission.next()) is not None:
            self._admitted(*admitted)
        if admission.obstacle is not None or not self._chunks.budget:
            self._note_obstacle(admission.obstacle or WaitReason.BUDGET)
        self._close(admission)
        if admission.lacks_row and self._config.capacity != "guaranteed_no_evict":
            self._give_back_row()

    def _admit_ahead(self, admission: Admission, place: tuple[float, int]) -> None:
        """Admit the requests that rank ahead of a started prompt."""
        while self._chunks.budget and self._has_row() and (admitted := admission.next_ahead(place)) is not None:
            self._admitted(*admitted)

    def _has_row(self) -> bool:
        return self._rows.num_running < self._max_rows

    def _place_of(self, row: int) -> tuple[float, int]:
        """Return the place of a row's request in the order of a policy with keys."""
        return self._rows.rank.item(row), self._rows.sequence.item(row)

    def _admitted(self, request: Request, room: Room, most: int | None = None) -> int:
        """Give a request its row and a chunk; return the used budget tokens."""
        admission = self._place(request, room)
        self._outcome.admitted.append((request, admission))
        return self._add_chunk(admission.row, most)

    def _note_obstacle(self, reason: WaitReason) -> None:
        """Record the obstacle for the requests that compete for the worker, and note it for the first one."""
        if self._worker.draining or not self._backlog.has_for(self._worker):
            return
        self._outcome.obstacle = reason
        first = self._backlog.first()
        if first is not None and first.wait.reason in (WaitReason.TURN, WaitReason.ROWS, WaitReason.BUDGET):
            first.waits_for(reason, self._now)

    def _give_back_row(self) -> None:
        """Preempt a request whose client does not read, because another request lacks only a row.

        The preempted request also had no credit in an earlier plan, and has no step in flight.
        """
        rows = self._rows
        if not any_of(rows.hold_noted):
            return
        idle = rows.hold_noted & (rows.length >= rows.allowed) & (rows.length == rows.committed)
        idle &= (rows.state == DECODE) & (rows.committed - rows.num_prompt > rows.preempted_at)
        idle[self._newly_held] = False
        candidates = where(idle)
        if len(candidates):
            row = int(candidates[np.argmax(rows.rank[candidates])])
            request = rows.requests[row]
            assert request is not None
            self._allocation.preempt(row, request)

    def _close(self, admission: Admission) -> None:
        admission.close()
        self._outcome.refused += admission.refused
        self._outcome.starved += admission.starved
        self._outcome.stranded += admission.stranded
        self._outcome.wanted += admission.wanted

    def _place(self, request: Request, room: Room) -> RowAdmission:
        self._pool.share(room.cached)
        num_cached_tokens = len(room.cached) * self._rows.block_size
        if room.partial is not None:
            # The current plan reads this block, so `take` below must not return it.
            source = np.array([room.partial.block], np.intp)
            worker = self._worker
            self._pool.read(source, last_step=worker.last_step + 1, answered_step=worker.answered_step)
            num_cached_tokens += room.partial.num_tokens
        window_room, taken = room.window, NO_INDICES
        if window_room is not None:
            self._pool.share(window_room.tail.ravel())
            taken = self._pool.take(window_room.num_new)
        blocks = self._pool.take(room.num_new)
        if len(room.cached):
            blocks = np.concatenate((room.cached, blocks))
        if room.partial is not None:
            self._copy_sources.append(room.partial.block)
            self._copy_targets.append(int(blocks[len(room.cached)]))
        num_computed = num_cached_tokens
        if room.swapped is not None:
            num_computed = room.swapped.num_tokens
            host_blocks = room.swapped.host_blocks
            targets = blocks[: -(-num_computed // self._rows.block_size)]
            targets = np.concatenate((targets, taken[: len(host_blocks) - len(targets)]))
            self._swap_ins.append(self._worker.swap.back(host_blocks, targets))
            self._worker.release_swapped(request, last_step=self._worker.last_step + 1)
        num_unusable = self._worker.prefixes.num_unusable_tokens(request, num_computed)
        row = self._rows.occupy(
            request,
            limit=self._worker.limit_of(request),
            frontend_index=self._frontends[request.key.frontend],
            blocks=blocks,
            num_computed=num_computed,
            num_shared=len(room.cached),
            rank=self._policy.rank(request),
            num_window_blocks=0 if window_room is None else window_room.tail.size + window_room.num_new,
            most_window_blocks=0 if window_room is None else window_room.tail.size + window_room.most_new,
        )
        windows = None
        if window_room is not None:
            assert self._worker.windows is not None
            windows = self._worker.windows.open(
                row, window_room, taken, num_shared=window_room.first, num_blocks=len(blocks)
            )
            self._worker.publisher.want_boundaries(row, window_room.boundaries)
        checkpoint = None if room.swapped is None else room.swapped.state
        if self._worker.checkpoints is not None:
            if len(room.cached):
                checkpoint = self._worker.prefixes.restore_state(request, room.cached, self._worker.last_step + 1)
                if self._copies is not None and checkpoint >= self._worker.checkpoints.num_slots:
                    self._copies.state_restored()
            self._worker.publisher.want_checkpoints(row, num_computed // self._rows.block_size)
        self._worker.prefilling.append(row)
        self._worker.capacity.is_growing = True
        self._worker.grammars.occupied(request.grammar_key)
        forecast = self._forecast.learned_output_tokens(request) if self._tenants.have_rates else 0.0
        self._tenants.started(request, forecast, self._now)
        self._backlog.tenant_changed(request.spec.tenant, self._now)
        if self._policy.accounts_service and not request.attempts and not request.num_generated:
            uncached = max(0, request.spec.num_prompt_tokens - num_cached_tokens)
            self._policy.served(request.account, prompt_tokens=uncached)
        self._worker.counters.prompt_tokens += len(request.tokens)
        num_restored = num_computed - num_cached_tokens + min(request.restored_tokens, num_cached_tokens)
        num_loaded = min(request.loaded_tokens, num_restored)
        request.restored_tokens = request.loaded_tokens = request.num_loads = 0
        self._worker.counters.cached_tokens += num_computed - num_restored
        self._worker.counters.restored_tokens += num_restored - num_loaded
        self._worker.counters.loaded_tokens += num_loaded
        self._worker.counters.unusable_tokens += num_unusable
        return RowAdmission(
            row=row,
            generation=self._rows.generation.item(row),
            spec=request.spec,
            token_ids=as_column(request.tokens),
            num_computed_tokens=num_computed,
            num_restored_tokens=num_restored,
            num_loaded_tokens=num_loaded,
            num_unusable_tokens=num_unusable,
            blocks=blocks,
            windows=windows,
            frontend=request.key.frontend,
            stream=request.key.stream,
            attempt=request.attempts,
            queued_since=request.wait.since,
            checkpoint=checkpoint,
        )

    def _issue(self, decodes: IndexArray) -> Plan:
        worker, rows = self._worker, self._rows
        rows.outlook = None
        holds, releases = self._update_held(decodes)
        # Process decode rows first, because prefill rows become decode rows below.
        length = rows.length[decodes] + ONE
        rows.length[decodes] = length
        context = self._context(decodes, length)
        draft_rows = draft_limits = NO_INDICES
        if self._draft_limits is not None:
            draft_rows, draft_limits = self._set_draft_limits(decodes, *self._draft_limits)
        if worker.model.state_bytes and worker.speculation.max_drafts:
            rows.last_limit[decodes] = rows.draft_limit[decodes]
        prefilled, pooled = self._advance_prefills()
        append_rows = _joined(self._allocation.appended_rows)
        saves = save_states(worker, append_rows, self._chunks.rows, self._allocation.swapped_states)
        if worker.windows is not None:
            worker.release_passed([*append_rows.tolist(), *self._chunks.rows])
        sampling, chunk_rows = decodes, _indices(self._chunks.rows)
        if prefilled:
            sampling = np.concatenate((decodes, np.array(prefilled, np.intp)))
            sampling.sort()
            length = rows.length[sampling]
        num_tokens = len(decodes) + sum(self._chunks.lengths)
        shape = StepShape(len(decodes), self._chunks.cost, context, self._num_drafts)
        least_s, expected_s, allowance = worker.costs.bounds(shape, self._config.step_deadline_s)
        swap_outs, swap_ins = self._allocation.swap_outs, self._swap_ins
        if self._copies is not None:
            self._copies.move_out(expected_s)
            swap_outs, swap_ins = swap_outs + self._copies.outs, swap_ins + self._copies.ins
        kept_checkpoints, kept_places = kept_states(worker)
        leaves = worker.pending_leaves
        worker.pending_leaves = []
        worker.last_step += 1
        worker.last_tokens = num_tokens
        worker.in_flight.append(
            StepInFlight(
                step=worker.last_step,
                rows=sampling,
                generations=rows.generation[sampling],
                draft_limits=rows.draft_limit[sampling] if self._num_drafts else None,
                prefilled=prefilled,
                pooled=[(row, int(rows.generation[row])) for row in pooled],
                shape=shape,
                expected_s=expected_s,
                least_s=least_s,
                started=self._now,
                successor_due=self._now + worker.timing.lead(least_s),
                # Rows that decoded before and are not released in this step can always continue.
                goes_on=bool(worker.in_flight) or len(decodes) > len(releases),
                chunk_rows=self._chunks.rows,
                chunk_generations=rows.generation[chunk_rows],
                chunk_lengths=self._chunks.lengths,
                solo=None if worker.trials.running is None else worker.trials.running.request,
                copy_ids=[copy.copy_id for copy in swap_outs + swap_ins],
                allowance=allowance,
            )
        )
        worker.counters.steps += 1
        worker.capacity.step_planned()
        worker.counters.scheduled_tokens += num_tokens
        worker.counters.decode_rows += len(decodes)
        worker.counters.chunks += len(self._chunks.rows)
        plan = Plan(
            worker=worker.peer,
            epoch=worker.epoch,
            step=worker.last_step,
            leaves=_indices(leaves),
            admissions=tuple(admission for _, admission in self._outcome.admitted),
            append_rows=append_rows,
            append_blocks=_joined(self._allocation.appended_blocks),
            append_windows=self._allocation.appended_windows(),
            chunk_rows=chunk_rows,
            chunk_lengths=_indices(self._chunks.lengths),
            holds=holds,
            releases=releases,
            swap_outs=tuple(swap_outs),
            swap_ins=tuple(swap_ins),
            copy_sources=_indices(self._copy_sources),
            copy_targets=_indices(self._copy_targets),
            draft_rows=draft_rows,
            draft_limits=draft_limits,
            save_rows=saves.rows,
            save_lengths=saves.lengths,
            save_checkpoints=saves.checkpoints,
            kept_checkpoints=kept_checkpoints,
            kept_places=kept_places,
            num_decodes=len(decodes),
            num_tokens=num_tokens,
            traced_rows=self._traced() if rows.traced else (),
        )
        at_limit = length >= rows.limit[sampling]
        self._outcome.ending += (sampling[at_limit].tolist() if any_of(at_limit) else []) + pooled
        return plan

    def _context(self, decodes: IndexArray, length: Int32Array) -> int:
        """Return the decode rows' total length, updated from the previous step if all of them decoded in it."""
        worker = self._worker
        is_same = decodes is worker.decoded_rows and not worker.speculation.max_drafts
        return worker.decoded(decodes, None if is_same else length)

    def _set_draft_limits(
        self, decodes: IndexArray, of_limits: IndexArray, limits: Int32Array
    ) -> tuple[IndexArray, IndexArray]:
        """Set the draft limits and count the step's drafts; return the changed rows and their limits."""
        rows = self._rows
        changed = (limits != rows.draft_limit[of_limits]) & (rows.state[of_limits] == DECODE)
        draft_rows: IndexArray = of_limits[changed]
        rows.set_draft_limits(draft_rows, limits[changed])
        rows.drafts[decodes] += rows.draft_limit[decodes]
        return draft_rows, limits[changed].astype(np.intp)

    def _update_held(self, decodes: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Return the rows that this step starts to hold out, and the rows that it resumes."""
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
        """Count the chunks as computed, and return the rows whose prompt is complete.

        Returns:
            new decode rows, and pooling rows that have ended.
        """
        rows = self._rows
        prefilled: list[int] = []
        pooled: list[int] = []
        for row, chunk in zip(self._chunks.rows, self._chunks.lengths, strict=True):
            computed = rows.computed.item(row) + chunk
            rows.computed[row] = computed
            if computed < rows.length.item(row):
                continue
            request = rows.requests[row]
            assert request is not None
            if request.spec.pooling != Pooling.NONE:
                pooled.append(row)
                continue
            rows.start_decoding(row)
            self._worker.prefilling.remove(row)
            prefilled.append(row)
        return prefilled, pooled

    def _traced(self) -> tuple[tuple[bytes, int], ...]:
        """Return the traced requests of the step, as (front end, stream)."""
        rows = self._rows
        traced = []
        for row in sorted(rows.traced):
            request = rows.requests[row]
            assert request is not None
            decodes = rows.state.item(row) == DECODE and not rows.held.item(row)
            if decodes or row in self._chunks.rows:
                traced.append(request.key)
        return tuple(traced)


def _indices(numbers: list[int]) -> IndexArray:
    return np.array(numbers, np.intp) if numbers else NO_INDICES


def _joined(parts: list[IndexArray]) -> IndexArray:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else NO_INDICES
