"""The scheduler's state machine: `handle` takes events, and `plan` returns a worker's next step.

`Scheduler` only routes events to the modules that own the state:

* `registry` owns the requests and `fleet` owns the workers;
* `delivery` distributes tokens to front ends;
* `planner` decides the contents of a step, and `results` applies its result.

The core reads no clock or socket. The caller passes the time and executes the effects.
"""

from collections.abc import Mapping
from typing import ClassVar

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import (
    AttemptPrefilled,
    DiskJobWanted,
    Effect,
    EndReason,
    FrontendUnknown,
    GrammarWanted,
    ScoresReady,
    ServiceChanged,
    WorkerEmptied,
    WorkerRefused,
    WorkerUnknown,
    WorkerWelcomed,
)
from scheduler_svc.core.interface.errors import ProtocolViolationError
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import NoteKind, Notes, QueueNote
from scheduler_svc.core.lifecycle.admission_control import largest_part
from scheduler_svc.core.lifecycle.pressure import Pressure, pressure
from scheduler_svc.core.lifecycle.registry import RequestRegistry
from scheduler_svc.core.lifecycle.statistics import RequestStats, SchedulerStats, forecast_stats, worker_stats
from scheduler_svc.core.lifecycle.tables import Tables, tables
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.planning.batch_selection import grammars_to_compile
from scheduler_svc.core.planning.delivery import Frontends
from scheduler_svc.core.planning.planner import Planner
from scheduler_svc.core.planning.results import Settled, settle
from scheduler_svc.core.planning.row_failures import (
    END_REASONS,
    FailedRequest,
    distrust_states,
    distrust_windows,
    judge,
    lost_prefix,
)
from scheduler_svc.core.planning.steady import plan_steady
from scheduler_svc.core.queueing.placement import Placement
from scheduler_svc.core.requests.history import Story
from scheduler_svc.core.requests.request import Request, RequestState
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.plan_schedule import PlanSchedule
from scheduler_svc.core.workers.plan_timing import EARLY_S
from scheduler_svc.core.workers.quarantine import REJECTED, Quarantine
from scheduler_svc.core.workers.rows import FREE
from scheduler_svc.core.workers.worker import Worker

_MOST_RETURNING = 64
"""Number of ended requests that may be listed as returning."""


class Scheduler:
    """Scheduler core.

    Args:
        config: limits and policies.
        incarnation: a random 64-bit number that no earlier core had.
        facts: computes the values that decisions need from token ids; None for the default.
        notes: receives every note for every request's history and every queue, in order; the caller empties it. None if
            not needed.
    """

    def __init__(
        self,
        config: CoreConfig,
        incarnation: int,
        facts: TokenFacts | None = None,
        notes: Notes | None = None,
    ) -> None:
        self._config = config
        self._effects: list[Effect] = []
        self._frontends = Frontends(self._effects)
        self._fleet = Fleet(config, incarnation, facts if facts is not None else TokenFacts())
        self._announced = self._fleet.service()
        self._requests = RequestRegistry(config, self._fleet, self._effects, notes)
        self._notes = notes
        self._placement = Placement(self._requests.backlog, self._fleet.directory, config.max_num_seqs)
        self._schedule = PlanSchedule(config.max_plans_in_flight, collects=config.batching.mode != "continuous")
        self._quarantine = Quarantine()
        self._returning: list[Request] = []
        """Requests of an earlier scheduler that arrived since the last plan, or for which the last plan had no room."""
        self._untidy: list[tuple[Worker, list[int]]] = []
        """Workers that got a plan since the last call to `tidy`, with the rows whose requests end with this plan."""

    # ---------------------------------------------------------------- the two entry points

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Apply one event and return the effects to execute, in order."""
        if self._untidy:
            self.tidy()
        self._fleet.time_passes(now)
        if type(event) is not ev.RequestArrived:
            self._requests.forecast.workers_change()
        getattr(self, self._HANDLERS[type(event)])(event, now)
        return self._take_effects()

    def plan(self, peer: ev.Peer, now: float) -> tuple[Plan | None, list[Effect]]:
        """Return the next plan for a worker, and the effects to execute before it is sent.

        The plan is None if there is nothing to do, if it is too early, or if enough plans are in flight. An effect is,
        for example, the end of a request that can never run. Call `tidy` after sending the plan.
        """
        worker = self._fleet.get(peer)
        if worker is None or not self._is_due(worker, now):
            self.tidy()
            return None, []
        return self._plan_due(worker, now)

    def _plan_due(self, worker: Worker, now: float) -> tuple[Plan | None, list[Effect]]:
        """Like `plan`, for a worker whose plan is due."""
        if self._untidy:
            self.tidy()
        self._requests.forecast.workers_change()
        backlog = self._requests.backlog
        backlog.time_passed(now)
        if self._returning:
            self._send_home(now)
        may_admit = backlog.has_for(worker)
        if not (may_admit or worker.has_work):
            return None, []
        plan = None if may_admit else plan_steady(worker, self._config.step_deadline_s, now)
        if plan is not None:
            self._planned(worker, [], now)
            return plan, []
        return self._plan(worker, now), self._take_effects()

    def _send_home(self, now: float) -> None:
        """Assign the requests of an earlier scheduler to the workers that have their KV.

        Otherwise, the plans of other workers would look at them first. After a takeover, these are thousands.
        """
        returning, self._returning = self._returning, []
        backlog = self._requests.backlog
        for request in returning if len(self._fleet) > 1 else ():
            if backlog.competes(request) and not request.faults.suspect:
                home = self._placement.home(request)
                if home is not None:
                    backlog.take_this(request)
                    backlog.assign(request, home, now)

    def is_due(self, peer: ev.Peer, now: float) -> bool:
        """Return whether a call of `plan` could have an effect."""
        worker = self._fleet.get(peer)
        return worker is not None and self._is_due(worker, now)

    def _is_due(self, worker: Worker, now: float) -> bool:
        due = worker.plan_due(self._config.max_plans_in_flight)
        return due is not None and due <= now + EARLY_S

    def _plan(self, worker: Worker, now: float) -> Plan | None:
        """Make a plan, and apply its consequences to the requests."""
        requests, backlog = self._requests, self._requests.backlog
        worker.pool.end_retention(now)
        if worker.swap.disk is not None:
            worker.swap.disk.time_passed(now)
        outcome = Planner(
            worker,
            backlog,
            self._placement if len(self._fleet) > 1 else None,
            requests.tenants,
            requests.forecast,
            self._config,
            self._frontends.numbers,
            max(0, requests.num_waiting - backlog.num_late) // len(self._fleet),
            max(0, requests.queued_tokens - backlog.late_tokens) // len(self._fleet),
            now,
        ).run()
        self._send_jobs(worker)
        if outcome.obstacle is not worker.obstacle:
            worker.obstacle = outcome.obstacle
            if self._notes is not None:
                self._notes.append(QueueNote(worker=worker.peer, time=now, reason=outcome.obstacle))
        for refusal in outcome.refused:
            requests.refuse(refusal.request, refusal.reason, now, message=refusal.message)
        if outcome.wanted:
            self._compile(worker, outcome.wanted)
        for request in outcome.starved:
            requests.requeue(request, now)
        for request in outcome.stranded:
            requests.strand(request, now)
        for request, by in outcome.preempted:
            requests.preempted(request, by, worker, now)
        for request, admission in outcome.admitted:
            requests.admitted(request, worker, admission, now)
        if outcome.plan is None:
            backlog.recall(worker, now)
            self._placement.planned(worker)
        else:
            left = self._planned(worker, outcome.ending, now)
            if outcome.admitted:
                self._returning += [request for request in left if request.is_returning]
        return outcome.plan

    def _planned(self, worker: Worker, ending: list[int], now: float) -> list[Request]:
        """Record that a plan was made; `ending` are the rows whose requests end with it.

        Returns:
            The requests that were assigned to the worker and that the plan did not admit. They compete again.
        """
        left = self._requests.backlog.recall(worker, now)
        self._placement.planned(worker)
        self._schedule.update(worker)
        self._untidy.append((worker, ending))
        return left

    def tidy(self) -> None:
        """Do the work deferred from the last plan, for which the worker need not wait.

        Requests whose last step was planned leave their rows, which publishes their blocks. Cached blocks that the next
        plan may need are evicted, or move to host memory with the next plan. The time of the call does not affect
        results, because the next event or plan calls it first.
        """
        while self._untidy:
            worker, rows = self._untidy.pop()
            for row in rows:
                self._requests.last_step_planned(worker.vacate(row))
            if worker.swap.pays:
                worker.swap.blocks_taken(worker.pool.num_taken(), worker.pool.num_blocks)
            else:
                worker.pool.keep_reserve()

    def _take_effects(self) -> list[Effect]:
        """Return the effects since the last call."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    @property
    def is_idle(self) -> bool:
        """Whether no request is live."""
        return not len(self._requests)

    def next_plan_due(self, now: float) -> float | None:
        """Return the next time after `now` at which a plan becomes due without an event."""
        return self._schedule.next_due(now)

    def due_workers(self, now: float) -> list[ev.Peer]:
        """Return the workers whose plan is due, or nearly due and worth sending together; longest due first."""
        backlog = self._requests.backlog
        due = self._schedule.due(now, for_any=backlog.may_start, for_each=backlog.assigned_workers)
        return [worker.peer for worker in due]

    def shortest_step_s(self) -> float:
        """Return the shortest expected time of the newest steps in flight, s; 0 if none is expected."""
        return min((worker.in_flight[-1].expected_s for worker in self._fleet if worker.in_flight), default=0.0)

    def workers(self) -> list[ev.Peer]:
        """Return the workers that can get plans."""
        return [worker.peer for worker in self._fleet]

    def worker(self, peer: ev.Peer) -> Worker | None:
        """Return a worker's state, for reading only."""
        return self._fleet.get(peer)

    def epochs(self) -> set[int]:
        """Return the epochs of the connected workers."""
        return {worker.epoch for worker in self._fleet}

    def stats(self) -> SchedulerStats:
        """Return the metrics."""
        self.tidy()
        return SchedulerStats(
            block_size=self._announced.block_size,
            running=sum(worker.rows.num_running for worker in self._fleet),
            waiting=self._requests.num_waiting,
            waiting_by_reason=self._requests.waiting_by_reason,
            frontends=len(self._frontends),
            ended=dict(self._requests.ended),
            forecasts=forecast_stats(self._requests.forecast),
            workers=[worker_stats(worker) for worker in self._fleet],
            sessions=self._requests.session_stats,
        )

    def pressure(self, now: float) -> Pressure:
        """Return the current pressure on the service."""
        self.tidy()
        return pressure(self._fleet, self._requests, self._config, now)

    def tables(self) -> Tables:
        """Return the current queues and KV blocks."""
        self.tidy()
        return tables(self._fleet, self._requests.backlog, self._requests, self._requests.sessions)

    def story(self, frontend: ev.Peer, stream: int) -> Story | None:
        """Return the history of a stream's request, live or recently ended; None if unknown."""
        return self._requests.story(frontend, stream)

    def stories(self, request_id: str) -> list[Story]:
        """Return the histories of all requests with this id, live or ended recently."""
        return self._requests.stories(request_id)

    def requests(self, most: int) -> list[RequestStats]:
        """Return the metrics of at most `most` live requests, in order of arrival."""
        self.tidy()
        return self._requests.stats(most)

    def knows(self, identity: bytes) -> bool:
        """Return whether a request with this identity is live or has a retained log."""
        return self._requests.identified.knows(identity)

    def cancelling(self, request_id: str) -> list[ev.Event]:
        """Return the events that end the live requests with this id and drop their logs."""
        return [
            ev.RequestCancelled(frontend=request.key.frontend, stream=request.key.stream)
            if not request.is_logged
            else ev.RequestsDropped(identities=(request.spec.identity,))
            for request in self._requests.find(request_id)
        ]

    def validate(self) -> None:
        """Check every invariant that spans several parts; for tests and simulation."""
        self.tidy()
        for worker in self._fleet:
            worker.validate()
        self._requests.validate()

    # ---------------------------------------------------------------- front ends and requests

    def _frontend_joined(self, event: ev.FrontendJoined, now: float) -> None:
        self._frontends.join(event.frontend)

    def _frontend_lost(self, event: ev.FrontendLost, now: float) -> None:
        for request in self._requests:
            if request.key.frontend == event.frontend:
                self._requests.end(request, EndReason.CANCELLED, now)
        self._frontends.leave(event.frontend)

    def _request_arrived(self, event: ev.RequestArrived, now: float) -> None:
        if event.frontend in self._frontends:
            request = self._requests.arrive(event, now)
            if request is not None and request.is_returning:
                self._returning.append(request)
                if len(self._returning) > _MOST_RETURNING + 2 * self._requests.num_waiting:
                    # Many have ended, because no worker gets a plan.
                    self._returning = [each for each in self._returning if self._requests.backlog.competes(each)]
            if request is not None and self._fleet.with_disk:
                self._load_ahead(request, now)
        else:
            self._effects.append(FrontendUnknown(frontend=event.frontend))

    def _request_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        request = self._requests.get(event.frontend, event.stream)
        if request is not None:
            self._requests.end(request, EndReason.CANCELLED, now, keep=event.keep)

    def _resume_asked(self, event: ev.ResumeAsked, now: float) -> None:
        self._requests.resume(event, now)

    def _requests_dropped(self, event: ev.RequestsDropped, now: float) -> None:
        self._requests.drop(event.identities, now)

    def _logs_restored(self, event: ev.LogsRestored, now: float) -> None:
        self._requests.identified.restore(event, now)

    def _stop_matched(self, event: ev.StopMatched, now: float) -> None:
        request = self._requests.get(event.frontend, event.stream)
        if request is not None:
            self._requests.end(request, EndReason.STOP_STRING, now, completion_tokens=event.keep_tokens)

    def _credit_granted(self, event: ev.CreditGranted, now: float) -> None:
        request = self._requests.get(event.frontend, event.stream)
        if request is not None:
            self._requests.grant(request, event.credit, now)

    # ---------------------------------------------------------------- workers and steps

    def _worker_hello(self, event: ev.WorkerHello, now: float) -> None:
        survived = event.reason in (ev.HelloReason.SESSION_LOST, ev.HelloReason.PROTOCOL_ERROR)
        again = self._fleet.get(event.worker)
        if again is not None:
            self._lose(again, f"it connected again: {event.reason.value}", now, fatal=not survived)
        reason = self._fleet.refusal(event, models_in_use=self._requests.models, now=now)
        if reason is not None:
            self._effects.append(WorkerRefused(worker=event.worker, reason=reason))
        else:
            # A refused process does not replace a worker, even if it uses the worker's name.
            replaced = self._fleet.named(event.worker_id)
            if replaced is not None:
                self._lose(replaced, f"a worker of its name connected: {event.reason.value}", now, fatal=not survived)
                self._effects.append(WorkerUnknown(worker=replaced.peer))
            former = self._fleet.fingerprint
            worker = self._fleet.join(event)
            if former not in ("", worker.model.fingerprint):
                self._requests.model_changed()
            if not survived:
                self._quarantine.worker_died(event.worker_id)
            else:
                for request in self._quarantine.worker_survived(event.worker_id):
                    left = f"{request.faults.fatal_steps} left"
                    back = f"{event.worker_id} is back, so its last step was not fatal: {left}"
                    request.note(now, NoteKind.FAULT, back)
            self._schedule.update(worker)
            self._effects.append(
                WorkerWelcomed(worker=event.worker, epoch=worker.epoch, protocol_version=worker.protocol_version)
            )
        self._fleet_changed(now)

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self._fleet.get(event.worker)
        if worker is not None:
            self._lose(worker, event.reason, now, fatal=not event.orderly)
            self._fleet_changed(now)

    def _lose(self, worker: Worker, reason: str, now: float, *, fatal: bool) -> None:
        """End a worker's epoch and requeue its requests; `fatal`: a step in flight may have killed the worker."""
        requests_in_flight = worker.requests_in_flight() if fatal else []
        is_alone = worker.lone_suspect() is not None
        left_behind = self._fleet.leave(worker, now)
        self._requests.doubt_grammars()
        self._schedule.remove(worker)
        # Determine suspect requests first, because `displace` puts them into a separate queue.
        rejected = (
            self._quarantine.worker_lost(worker.worker_id, requests_in_flight, alone=is_alone, now=now) if fatal else []
        )
        for request in left_behind:
            self._requests.displace(request, "worker lost", f"lost {worker.worker_id}: {reason}", now)
        if left_behind:
            ids = tuple(request.spec.request_id for request in left_behind)
            self._effects.append(WorkerEmptied(worker_id=worker.worker_id, reason=reason, request_ids=ids))
        for request in requests_in_flight:
            line = f"in a fatal step: {request.faults.fatal_steps}" + (", alone" if is_alone else "")
            request.note(now, NoteKind.FAULT, line)
        for request in rejected:
            self._requests.end(request, EndReason.POISON, now, message=REJECTED)

    def _drain_requested(self, event: ev.DrainRequested, now: float) -> None:
        worker = self._fleet.named(event.worker_id)
        if worker is None:
            return
        self._fleet.drain(worker)
        self._requests.doubt_grammars()
        self._fleet_changed(now)
        if not event.move:
            return
        # A request stays if no other worker has room for its tokens.
        for row in worker.rows.occupied():
            request = worker.rows.requests[row]
            assert request is not None
            if worker.rows.limit[row] <= self._requests.backlog.kinds.longest(request):
                self._requests.displace(worker.vacate(row), "moved", f"moved away from {worker.worker_id}", now)

    def _resume_requested(self, event: ev.ResumeRequested, now: float) -> None:
        worker = self._fleet.resume(event.worker_id)
        if worker is not None:
            self._fleet_changed(now)
            self._requests.doubt_grammars()

    def _worker_compiling(self, event: ev.WorkerCompiling, now: float) -> None:
        worker = self._known(event)
        if worker is not None:
            worker.compiling_until = now + event.expected_s

    def _grammar_reported(self, event: ev.GrammarReported, now: float) -> None:
        worker = self._known(event)
        if worker is None or not worker.grammars.reported(event.key, event.failure):
            return
        self._requests.backlog.grammar_reported(event.key, now)
        if event.failure is not None:
            self._requests.refuse_grammar(event.key, now)
        if not worker.draining:
            self._compile(worker, grammars_to_compile(worker, self._requests.backlog))

    def _disk_reported(self, event: ev.DiskReported, now: float) -> None:
        worker = self._known(event)
        if worker is None or worker.swap.disk is None:
            return
        disk = worker.swap.disk
        disk.files_refused(event.refused)
        if event.copy_id:
            num_read = disk.reported(event.copy_id, event.failed, now)
            if num_read and event.seconds > 0.0:
                worker.costs.reads_measured(num_read, event.seconds)
        else:
            disk.listed(event.found, is_complete=event.is_complete)
        self._use_disk(worker, now)

    def _load_ahead(self, request: Request, now: float) -> None:
        """Start to read the prefix of a new request from disk, on the worker that has most of it."""
        if request.state is not RequestState.QUEUED:
            return
        found = [
            (worker.prefixes.match(request), worker)
            for worker in self._fleet.with_disk.values()
            if not worker.draining and worker.swap.disk is not None and worker.swap.disk.keys
        ]
        if not found:
            return
        match, worker = max(found, key=lambda each: each[1].prefixes.num_cached(each[0]))
        worker.prefixes.load(
            request,
            match,
            now,
            num_started=worker.prefill_backlog(),
            num_competing=self._requests.backlog.competing_tokens // len(self._fleet),
        )
        self._send_jobs(worker)

    def _use_disk(self, worker: Worker, now: float) -> None:
        """Start to write blocks to a worker's disk, and send the jobs."""
        worker.prefixes.write_to_disk(now)
        self._send_jobs(worker)

    def _send_jobs(self, worker: Worker) -> None:
        disk = worker.swap.disk
        if disk is not None and disk.outbox:
            for job in disk.outbox:
                self._effects.append(DiskJobWanted(worker=worker.peer, epoch=worker.epoch, job=job))
            disk.outbox.clear()

    def _compile(self, worker: Worker, requests: list[Request]) -> None:
        """Ask a worker to compile the grammars of requests."""
        self._effects.extend(
            GrammarWanted(
                worker=worker.peer,
                epoch=worker.epoch,
                key=request.grammar_key,
                grammar=request.spec.grammar,
                drop=worker.grammars.make_room(),
            )
            for request in requests
        )

    def _step_done(self, event: ev.StepDone, now: float) -> None:
        worker = self._known(event)
        if worker is None:
            return
        try:
            settled = settle(worker, event, now)
        except ProtocolViolationError as error:
            self._give_up(worker, str(error), now, fatal=False)
            return
        if self._requests.backlog.charges_output:
            self._charge(worker, settled, now)
        for request, index, of_prompt, scores in settled.scores:
            if request.is_logged and not of_prompt:
                request.scores.append((index, scores))
            self._effects.append(
                ScoresReady(
                    frontend=request.key.frontend,
                    stream=request.key.stream,
                    first_index=index,
                    of_prompt=of_prompt,
                    scores=scores,
                )
            )
        self._schedule.update(worker)
        self._placement.changed(worker)
        self._frontends.deliver(worker.rows, settled)
        worker.trials.judge(in_flight=bool(worker.in_flight))
        for request in settled.first_tokens:
            self._requests.forecast.had_first_token(request.prediction, now - request.arrival)
        for request in settled.prefilled:
            self._effects.append(AttemptPrefilled(frontend=request.key.frontend, stream=request.key.stream))
        if settled.failed:
            # Handle failures before other requests leave their rows. A row that got a token proves that its blocks are
            # valid.
            self._rows_failed(worker, settled, now)
        for request, token in settled.stopped:
            self._requests.end(request, EndReason.STOP, now, stop_token_id=token)
        for request in settled.at_limit:
            self._at_limit(worker, request, now)
        for row in settled.ending:
            # This request may have ended another request in the step, or the other request's row failed.
            if worker.rows.state[row] != FREE:
                self._requests.last_step_planned(worker.vacate(row))
        for request, values in settled.embedded:
            self._requests.end(request, EndReason.EMBEDDED, now, embedding=values)
        if worker.swap.disk is not None:
            self._use_disk(worker, now)

    def _charge(self, worker: Worker, settled: Settled, now: float) -> None:
        """Charge the step's tokens to the accounts of their requests. No other code charges tokens."""
        charges = worker.rows.charge(settled.rows, settled.counts)
        charges += [(request.account, 1) for request, _, _ in settled.late]
        self._requests.backlog.charge(charges, now)

    def _at_limit(self, worker: Worker, request: Request, now: float) -> None:
        """End a request at its limit.

        If only the worker's context is full, requeue it for a worker with a longer context.
        """
        if request.limit <= worker.max_model_len:
            self._requests.end(request, EndReason.LENGTH, now)
            return
        running = self._requests.row_of(request)
        if running is not None:
            worker.vacate(running)
        self._requests.displace(request, "moved", f"filled the context of {worker.worker_id}", now)

    def _rows_failed(self, worker: Worker, settled: Settled, now: float) -> None:
        """End or requeue the requests whose rows failed, and requeue those that share their invalid KV."""
        verdict = judge(worker, settled.failed, settled.rows)
        left = [(each.failure.row, each.failure.generation) for each in settled.failed]
        for failed in verdict.ends:
            if failed.request.state is not RequestState.FINISHED:
                failure = failed.failure
                reason = END_REASONS[failure.kind]
                self._requests.end(failed.request, reason, now, message=failure.reason, field=failure.field)
        for failed in verdict.again:
            self._compute_again(worker, failed, now, alone=False)
        for failed in verdict.alone:
            self._compute_again(worker, failed, now, alone=True)
        for row in verdict.sharers:
            left.append((row, worker.rows.generation.item(row)))
            request = worker.vacate(row)
            lost_prefix(request, alone=False)
            self._requests.displace(request, "prefix failed", "a row that it shares KV with failed", now)
        for key in left:
            if (departure := worker.departed.get(key)) is not None:
                departure.failure_handled = True
        # Mark the blocks last, because a request that leaves its row adds the row's blocks to the cache.
        worker.pool.cache.doubt(verdict.in_doubt)
        worker.pool.distrust(verdict.invalid)
        if worker.checkpoints is not None:
            distrust_states(worker.checkpoints, worker.swap, settled.failed)
        if worker.windows is not None:
            distrust_windows(worker, settled.failed)
        if len(verdict.invalid) or len(verdict.in_doubt):
            # The host table does not know which blocks were computed from these.
            worker.swap.drop_cached()

    def _compute_again(self, worker: Worker, failed: FailedRequest, now: float, *, alone: bool) -> None:
        """Requeue a request that failed because of other requests' KV; with `alone`, it no longer shares KV."""
        request = failed.request
        if request.state is RequestState.FINISHED:
            return
        lost_prefix(request, alone=alone)
        note = "its row failed; it is computed again" + (" without shared KV" if alone else "")
        if failed.in_row:
            worker.vacate(failed.failure.row)
            self._requests.displace(request, "prefix failed", note, now)
        elif request.state is RequestState.ENDING:
            self._requests.displace(request, "prefix failed", note, now)
        else:
            request.note(now, NoteKind.FAULT, note)
            self._requests.drop_swapped(request)

    def _known(self, event: ev.StepDone | ev.WorkerCompiling | ev.GrammarReported | ev.DiskReported) -> Worker | None:
        """Return the worker of an event, or None if the event's epoch has ended."""
        worker = self._fleet.get(event.worker)
        if worker is None:
            self._effects.append(WorkerUnknown(worker=event.worker))
            return None
        return worker if worker.epoch == event.epoch else None

    def _give_up(self, worker: Worker, reason: str, now: float, *, fatal: bool) -> None:
        self._lose(worker, reason, now, fatal=fatal)
        self._effects.append(WorkerUnknown(worker=worker.peer))
        self._fleet_changed(now)

    def _fleet_changed(self, now: float) -> None:
        """Report a changed service to front ends, and update the set of workers that accept requests."""
        self._requests.backlog.fleet_changed(self._fleet, now)
        self._placement.set_fleet([worker for worker in self._fleet if not worker.draining])
        # A worker may now be able to serve stranded requests.
        self._requests.fleet_changed(now)
        service = self._fleet.service()
        if service != self._announced:
            self._announced = service
            self._effects.append(self.service_state())

    def service_state(self) -> ServiceChanged:
        """Return what front ends must know about the service."""
        service = self._announced
        return ServiceChanged(
            ready=service.ready,
            model=service.model,
            max_model_len=service.max_model_len,
            block_size=service.block_size,
            max_call_requests=largest_part(self._config.max_queued_requests),
            max_call_tokens=largest_part(self._config.max_queued_tokens),
        )

    # ---------------------------------------------------------------- time

    def _time_passed(self, event: ev.TimePassed, now: float) -> None:
        for worker in self._fleet.overdue(now):
            self._give_up(worker, f"step {worker.answered_step + 1} is overdue", now, fatal=True)
        for worker in self._fleet.with_disk.values():
            if worker.swap.disk is not None:
                worker.swap.disk.time_passed(now)
        for worker in self._fleet:
            if worker.pool.retention.next_end <= now:
                worker.pool.end_retention(now)
        self._requests.time_passed(now)
        self._requests.backlog.time_passed(now)
        self._quarantine.time_passed(now)
        for worker in self._requests.backlog.recall_late(lambda worker: self._is_due(worker, now), now):
            self._placement.late(worker)

    def _shutdown_requested(self, event: ev.ShutdownRequested, now: float) -> None:
        for request in self._requests:
            self._requests.end(
                request, EndReason.SHUTDOWN, now, message="the service is shutting down; try again later"
            )

    _HANDLERS: ClassVar[Mapping[type, str]] = {
        ev.FrontendJoined: "_frontend_joined",
        ev.FrontendLost: "_frontend_lost",
        ev.RequestArrived: "_request_arrived",
        ev.RequestCancelled: "_request_cancelled",
        ev.ResumeAsked: "_resume_asked",
        ev.RequestsDropped: "_requests_dropped",
        ev.LogsRestored: "_logs_restored",
        ev.StopMatched: "_stop_matched",
        ev.CreditGranted: "_credit_granted",
        ev.WorkerHello: "_worker_hello",
        ev.WorkerLost: "_worker_lost",
        ev.DrainRequested: "_drain_requested",
        ev.ResumeRequested: "_resume_requested",
        ev.WorkerCompiling: "_worker_compiling",
        ev.GrammarReported: "_grammar_reported",
        ev.DiskReported: "_disk_reported",
        ev.StepDone: "_step_done",
        ev.TimePassed: "_time_passed",
        ev.ShutdownRequested: "_shutdown_requested",
    }
    """Method names instead of functions, because a core without references to functions can be snapshotted as plain
    data.
    """
