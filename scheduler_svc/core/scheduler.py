"""The state machine: one `handle` for everything that happens, one `plan` for what a worker does next.

It owns the requests, from arrival to end, and routes each event to the part that knows: `planner` for what a step
holds, `commit` for what its answer means. Every request ends in `_end`, exactly once.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import events as ev
from scheduler_svc.core.arrays import Int32Array
from scheduler_svc.core.commit import Settled, settle
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import (
    AttemptEnded,
    AttemptPrefilled,
    Effect,
    EndReason,
    FrontendUnknown,
    RequestEnded,
    ServiceChanged,
    TokensReady,
    WorkerRefused,
    WorkerUnknown,
    WorkerWelcomed,
)
from scheduler_svc.core.errors import ProtocolViolationError
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.forecast import Forecast
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.request import TOKEN_BYTES, Request, RequestKey, RequestState, to_tokens
from scheduler_svc.core.rows import DECODE
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.waiting import make_queue
from scheduler_svc.core.worker import Worker, WorkerCounters

_NATURAL_ENDS = (EndReason.STOP, EndReason.STOP_STRING, EndReason.LENGTH)


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """A worker's state for metrics; blocks as in `quire_kv_blocks`."""

    worker_id: str
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    rows_running: int
    draining: bool
    host_blocks_total: int
    host_blocks_held: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    plans_in_flight: int
    last_step_tokens: int
    counters: WorkerCounters


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The core's state for metrics."""

    running: int
    waiting: int
    frontends: int
    ended: dict[EndReason, int]
    workers: list[WorkerStats]


class Scheduler:
    """The scheduler core. `incarnation` is a random 64-bit number that no earlier core had."""

    def __init__(self, config: CoreConfig, incarnation: int) -> None:
        self._config = config
        self._frontends: dict[ev.Peer, int] = {}
        self._frontend_names: list[ev.Peer] = []
        self._requests: dict[RequestKey, Request] = {}
        self._running: dict[RequestKey, tuple[Worker, int]] = {}
        self._waiting = make_queue(config.policy, config.tenant_weights)
        self._forecast = Forecast()
        self._tenants = Tenants(config.tenant_limits)
        self._queued_tokens = 0
        self._stalling: dict[RequestKey, Request] = {}
        """Requests that were seen without credit; some may have got it since."""
        self._starved: dict[RequestKey, Request] = {}
        """Waiting requests whose readers have no credit."""
        self._fleet = Fleet(config, incarnation)
        self._announced = self._fleet.service()
        self._deadlines: list[tuple[float, int, RequestKey]] = []
        self._sequence = 0
        self._recent_wait = 0.0
        """Smoothed time from arrival to first plan."""
        self._ended: dict[EndReason, int] = dict.fromkeys(EndReason, 0)
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[..., None]] = {
            ev.FrontendJoined: self._frontend_joined,
            ev.FrontendLost: self._frontend_lost,
            ev.RequestArrived: self._request_arrived,
            ev.RequestCancelled: self._request_cancelled,
            ev.StopMatched: self._stop_matched,
            ev.CreditGranted: self._credit_granted,
            ev.WorkerHello: self._worker_hello,
            ev.WorkerLost: self._worker_lost,
            ev.DrainRequested: self._drain_requested,
            ev.ResumeRequested: self._resume_requested,
            ev.WorkerCompiling: self._worker_compiling,
            ev.StepDone: self._step_done,
            ev.TimePassed: self._time_passed,
            ev.ShutdownRequested: self._shutdown_requested,
        }

    # ---------------------------------------------------------------- the two entry points

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Takes one event in and returns what is to be done, in order."""
        self._fleet.time_passes(now)
        self._handlers[type(event)](event, now)
        return self._take_effects()

    def plan(self, peer: ev.Peer, now: float) -> Plan | None:
        """The next plan for a worker, or None: nothing to do, too early, or enough plans in flight.

        Effects of planning (preemptions, requests that can never run) are returned by `take_effects`.
        """
        worker = self._fleet.get(peer)
        if worker is None:
            return None
        due = worker.plan_due(self._config.max_plans_in_flight)
        if due is None or due > now:
            return None
        fleet = list(self._fleet)
        outcome = Planner(
            worker, fleet, self._waiting, self._tenants, self._forecast, self._config, self._frontends, now
        ).run()
        for refusal in outcome.refused:
            self._end(refusal.request, refusal.reason, now, message=refusal.message)
        for request in outcome.starved:
            self._requeue(request, now)
        for request in outcome.preempted:
            self._displace(request, "preempted", f"preempted on {worker.worker_id}", now)
        for request in outcome.ending:
            self._running.pop(request.key, None)  # absent when this very plan admitted it
        if outcome.plan is not None:
            for admission in outcome.plan.admissions:
                key = RequestKey(admission.frontend, admission.stream)
                request = self._requests[key]
                self._queued_tokens -= request.queued_tokens
                request.queued_tokens = 0
                self._drop_swapped(request)
                if request.state is RequestState.RUNNING:
                    self._running[key] = (worker, admission.row)
                self._recent_wait += 0.1 * (now - admission.queued_since - self._recent_wait)
        return outcome.plan

    def take_effects(self) -> list[Effect]:
        """Effects that planning has produced since the last call of `handle` or of this."""
        return self._take_effects()

    def next_plan_due(self, now: float) -> float | None:
        """The next time after `now` at which a plan becomes due by itself."""
        due = [worker.plan_due(self._config.max_plans_in_flight) for worker in self._fleet]
        return min((time for time in due if time is not None and time > now), default=None)

    def workers(self) -> list[ev.Peer]:
        """The workers that may be planned for."""
        return [worker.peer for worker in self._fleet]

    def stats(self) -> SchedulerStats:
        """Figures for metrics."""
        return SchedulerStats(
            running=sum(worker.rows.num_running for worker in self._fleet),
            waiting=len(self._waiting) + len(self._starved),
            frontends=len(self._frontends),
            ended=dict(self._ended),
            workers=[
                WorkerStats(
                    worker_id=worker.worker_id,
                    blocks_total=worker.pool.num_blocks,
                    blocks_free=worker.pool.num_free,
                    blocks_cached=worker.pool.num_cached,
                    blocks_held=worker.pool.num_held,
                    rows_running=worker.rows.num_running,
                    draining=worker.draining,
                    host_blocks_total=worker.swap.pool.num_blocks,
                    host_blocks_held=worker.swap.pool.num_held,
                    swapped_out_blocks=worker.swap.swapped_out_blocks,
                    swapped_in_blocks=worker.swap.swapped_in_blocks,
                    plans_in_flight=len(worker.in_flight),
                    last_step_tokens=worker.last_tokens,
                    counters=worker.counters,
                )
                for worker in self._fleet
            ],
        )

    def story(self, frontend: ev.Peer, stream: int) -> list[tuple[float, str]]:
        """What happened to a live request, with times."""
        request = self._requests.get(RequestKey(frontend, stream))
        return list(request.story) if request is not None else []

    def validate(self) -> None:
        """Checks every invariant that spans parts; for tests and simulation."""
        for worker in self._fleet:
            worker.validate()
            for row in worker.rows.occupied():
                request = worker.rows.requests[row]
                assert request is not None
                assert self._running[request.key] == (worker, row)
        queued = self._waiting.requests() + list(self._starved.values())
        assert len({request.key for request in queued}) == len(queued), "a request waits twice"
        ending = [r.key for r in self._requests.values() if r.state is RequestState.ENDING]
        live = [request.key for request in queued] + list(self._running) + ending
        assert sorted(live) == sorted(self._requests), "a request is nowhere or in two places"
        assert all(request.state is RequestState.WAITING for request in queued)
        for worker in self._fleet:
            worker.swap.pool.validate(
                r.swapped.host_blocks for r in queued if r.swapped is not None and r.swapped.epoch == worker.epoch
            )
        assert self._queued_tokens == sum(request.queued_tokens for request in queued)

    # ---------------------------------------------------------------- front ends and requests

    def _frontend_joined(self, event: ev.FrontendJoined, now: float) -> None:
        if event.frontend not in self._frontends:
            self._frontends[event.frontend] = len(self._frontend_names)
            self._frontend_names.append(event.frontend)

    def _frontend_lost(self, event: ev.FrontendLost, now: float) -> None:
        for request in [r for r in self._requests.values() if r.key.frontend == event.frontend]:
            self._end(request, EndReason.CANCELLED, now)
        self._frontends.pop(event.frontend, None)

    def _request_arrived(self, event: ev.RequestArrived, now: float) -> None:
        if event.frontend not in self._frontends:
            self._effects.append(FrontendUnknown(frontend=event.frontend))
            return
        key = RequestKey(event.frontend, event.stream)
        if key in self._requests:
            return  # submitted twice by a front end in doubt; the first one stands
        self._sequence += 1
        request = Request(
            key=key,
            request_id=event.request_id,
            tokens=to_tokens(event.token_ids),
            num_prompt_tokens=event.num_prompt_tokens,
            limit=event.num_prompt_tokens + event.max_tokens,
            stop_token_ids=tuple(event.stop_token_ids.tolist()),
            sampling=event.sampling,
            allowed=len(event.token_ids) + event.credit // TOKEN_BYTES,
            credit_remainder=event.credit % TOKEN_BYTES,
            deadline=event.deadline,
            traceparent=event.traceparent,
            salt=event.salt,
            tenant=event.tenant,
            priority=event.priority,
            expected_output_tokens=event.expected_output_tokens,
            ttft_deadline=event.ttft_deadline,
            total_deadline=min((t for t in (event.deadline, event.total_deadline) if t is not None), default=None),
            arrival=now,
            sequence=self._sequence,
            lowest_token=int(event.token_ids.min(initial=0)),
            highest_token=int(event.token_ids.max(initial=0)),
            keys={event.block_size: event.block_keys} if event.block_keys else {},
        )
        self._requests[key] = request
        request.note(now, "arrived")
        fits_tenant = self._tenants.may_queue(request)
        self._tenants.arrived(request, now)
        if not 0 < request.num_prompt_tokens <= len(request.tokens):
            self._end(request, EndReason.INVALID, now, message="the prompt is empty or longer than the tokens given")
        elif len(request.tokens) >= request.limit:
            self._end(request, EndReason.LENGTH, now)
        elif not fits_tenant:
            message = f"tenant {request.tenant!r} has as many requests waiting as it may"
            self._end(request, EndReason.QUEUE_FULL, now, message=message, retry_ms=self._retry_ms())
        elif self._queue_is_full(request):
            message = f"{len(self._waiting)} requests with {self._queued_tokens} tokens are waiting already"
            self._end(request, EndReason.QUEUE_FULL, now, message=message, retry_ms=self._retry_ms())
        else:
            if request.deadline is not None:
                self._watch_deadline(request, request.deadline)
            self._requeue(request, now)

    def _watch_deadline(self, request: Request, deadline: float) -> None:
        heapq.heappush(self._deadlines, (deadline, request.sequence, request.key))
        # Deadlines of requests that have ended stay until they pass, which a client may have set years ahead.
        if len(self._deadlines) > 64 + 2 * len(self._requests):
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._requests]
            heapq.heapify(self._deadlines)

    def _queue_is_full(self, request: Request) -> bool:
        config = self._config
        num_waiting = len(self._waiting) + len(self._starved)
        return num_waiting >= config.max_queued_requests or (
            num_waiting > 0 and self._queued_tokens + len(request.tokens) > config.max_queued_tokens
        )

    def _request_cancelled(self, event: ev.RequestCancelled, now: float) -> None:
        request = self._requests.get(RequestKey(event.frontend, event.stream))
        if request is not None:
            self._end(request, EndReason.CANCELLED, now)

    def _stop_matched(self, event: ev.StopMatched, now: float) -> None:
        request = self._requests.get(RequestKey(event.frontend, event.stream))
        if request is not None:
            self._end(request, EndReason.STOP_STRING, now, completion_tokens=event.keep_tokens)

    def _credit_granted(self, event: ev.CreditGranted, now: float) -> None:
        key = RequestKey(event.frontend, event.stream)
        request = self._requests.get(key)
        if request is None:
            return
        request.grant(event.credit)
        request.starved_since = None
        if key in self._running:
            worker, row = self._running[key]
            worker.rows.set_allowed(row, request.allowed)
        elif key in self._starved:
            del self._starved[key]
            self._requeue(request, now)

    def _requeue(self, request: Request, now: float) -> None:
        """Puts a request among the waiting, from wherever it was."""
        self._running.pop(request.key, None)
        if request.state is not RequestState.WAITING:
            self._tenants.paused(request, now)
        request.state = RequestState.WAITING
        self._queued_tokens += len(request.tokens) - request.queued_tokens
        request.queued_tokens = len(request.tokens)
        request.queued_since = now
        request.overtaken = request.passed_over = request.left_elsewhere = 0
        request.forecast_tokens = self._forecast.output_tokens(request)
        request.latest_start = self._forecast.latest_start(request)
        if request.allowed > len(request.tokens):
            self._waiting.push(request)
        else:
            request.starved_since = now
            self._starved[request.key] = self._stalling[request.key] = request

    def _end(
        self,
        request: Request,
        reason: EndReason,
        now: float,
        *,
        message: str = "",
        retry_ms: int = 0,
        completion_tokens: int | None = None,
        stop_token_id: int = 0,
    ) -> None:
        """The one exit: whatever state a request is in, it leaves here, once."""
        assert self._requests.pop(request.key) is request
        was = request.state
        request.state = RequestState.FINISHED
        self._drop_swapped(request)
        running = self._running.pop(request.key, None)
        if running is not None:
            worker, row = running
            worker.vacate(row)
            self._waiting.served(request, output_tokens=request.num_generated - request.accounted_tokens)
            self._attempt_ended(request, reason.value)
        elif request.key in self._starved:
            del self._starved[request.key]
        elif request.queued:
            self._waiting.discard(request)
        elif was is RequestState.ENDING:
            self._attempt_ended(request, reason.value)
        self._queued_tokens -= request.queued_tokens
        self._tenants.ended(request, now, was_running=was is not RequestState.WAITING)
        self._ended[reason] += 1
        if reason in _NATURAL_ENDS:
            self._forecast.request_finished(request)
        self._effects.append(
            RequestEnded(
                frontend=request.key.frontend,
                stream=request.key.stream,
                request_id=request.request_id,
                reason=reason,
                message=message,
                retry_ms=retry_ms,
                completion_tokens=request.num_generated if completion_tokens is None else completion_tokens,
                stop_token_id=stop_token_id,
                cached_prompt_tokens=request.num_cached_prompt_tokens,
                preemptions=request.preemptions,
                queued_s=(request.first_planned or now) - request.arrival,
            )
        )

    def _drop_swapped(self, request: Request) -> None:
        """Frees the host memory of a request that is over or goes on elsewhere."""
        if request.swapped is not None:
            for worker in self._fleet:
                worker.release_swapped(request, last_step=worker.last_step)
            request.swapped = None

    def _retry_ms(self) -> int:
        """When a refused client should try again: about as long as requests wait at present."""
        return int(1000 * min(30.0, max(0.1, self._recent_wait)))

    # ---------------------------------------------------------------- workers and steps

    def _worker_hello(self, event: ev.WorkerHello, now: float) -> None:
        again = self._fleet.get(event.worker)
        if again is not None:
            self._lose(again, "it said hello again", now)
        reason = self._fleet.refusal(event, model_in_use=bool(self._requests))
        if reason is not None:
            self._effects.append(WorkerRefused(worker=event.worker, reason=reason))
        else:
            # A process that cannot serve displaces nobody, whatever it calls itself.
            replaced = self._fleet.named(event.worker_id)
            if replaced is not None:
                self._lose(replaced, "another process serves under its name", now)
                self._effects.append(WorkerUnknown(worker=replaced.peer))
            worker = self._fleet.join(event)
            self._effects.append(WorkerWelcomed(worker=event.worker, epoch=worker.epoch))
        self._announce()

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self._fleet.get(event.worker)
        if worker is not None:
            self._lose(worker, event.reason, now)
            self._announce()

    def _lose(self, worker: Worker, reason: str, now: float) -> None:
        """Ends a worker's epoch: what ran there waits again."""
        for request in self._fleet.leave(worker, now):
            self._displace(request, "worker lost", f"lost {worker.worker_id}: {reason}", now)

    def _displace(self, request: Request, outcome: str, note: str, now: float) -> None:
        """A request left its worker and is not over."""
        request.preemptions += 1
        request.note(now, note)
        self._attempt_ended(request, outcome)
        self._requeue(request, now)

    def _drain_requested(self, event: ev.DrainRequested, now: float) -> None:
        worker = self._fleet.named(event.worker_id)
        if worker is None:
            return
        worker.draining = True
        self._announce()
        if not event.move:
            return
        # What only this worker has room for finishes here.
        longest = max((other.max_model_len for other in self._fleet if not other.draining), default=0)
        for row in worker.rows.occupied():
            if worker.rows.limit[row] <= longest:
                self._displace(worker.vacate(row), "moved", f"moved away from {worker.worker_id}", now)

    def _resume_requested(self, event: ev.ResumeRequested, now: float) -> None:
        worker = self._fleet.named(event.worker_id)
        if worker is not None:
            worker.draining = False
            self._announce()

    def _worker_compiling(self, event: ev.WorkerCompiling, now: float) -> None:
        worker = self._known(event)
        if worker is not None:
            worker.compiling_until = now + event.expected_s

    def _step_done(self, event: ev.StepDone, now: float) -> None:
        worker = self._known(event)
        if worker is None:
            return
        try:
            settled = settle(worker, event, now)
        except ProtocolViolationError as error:
            self._give_up(worker, str(error), now)
            return
        if settled.num_prefill_tokens:
            worker.gate.prefill_measured(settled.duration)
        self._forecast.step_measured(settled.num_tokens, settled.num_prefill_tokens, settled.duration)
        self._deliver(worker, settled)
        for request in settled.prefilled:
            self._effects.append(AttemptPrefilled(frontend=request.key.frontend, stream=request.key.stream))
        for request, token in settled.stopped:
            self._end(request, EndReason.STOP, now, stop_token_id=token)
        for request in settled.at_limit:
            self._end(request, EndReason.LENGTH, now)
        for failed in settled.failed:
            if failed.request.state is not RequestState.FINISHED:
                self._end(failed.request, EndReason.ROW_FAILED, now, message=failed.reason)
            # Whoever built on what the row wrote computes it again.
            for row in worker.distrust(failed.blocks):
                request = worker.vacate(row)
                worker.distrust(failed.blocks)
                self._displace(request, "prefix failed", "the row that computed its prefix failed", now)

    def _deliver(self, worker: Worker, settled: Settled) -> None:
        rows = worker.rows
        streams = rows.stream[settled.rows]
        if len(self._frontends) == 1 and len(streams):
            (frontend,) = self._frontends
            self._tokens_ready(frontend, streams, settled.first_indices, settled.tokens)
        elif len(streams):
            owners = rows.frontend[settled.rows]
            for index in np.unique(owners).tolist():
                mine = owners == index
                self._tokens_ready(
                    self._frontend_names[index], streams[mine], settled.first_indices[mine], settled.tokens[mine]
                )
        late: dict[ev.Peer, list[tuple[int, int, int]]] = {}
        for request, index, token in settled.late:
            late.setdefault(request.key.frontend, []).append((request.key.stream, index, token))
        for frontend, entries in late.items():
            streams, first_indices, tokens = np.array(entries, np.int32).T
            self._tokens_ready(frontend, streams, first_indices, tokens)

    def _tokens_ready(
        self, frontend: ev.Peer, streams: Int32Array, first_indices: Int32Array, tokens: Int32Array
    ) -> None:
        self._effects.append(
            TokensReady(frontend=frontend, streams=streams, first_indices=first_indices, tokens=tokens)
        )

    def _known(self, event: ev.StepDone | ev.WorkerCompiling) -> Worker | None:
        """The worker of an event, or None when its epoch is over."""
        worker = self._fleet.get(event.worker)
        if worker is None:
            self._effects.append(WorkerUnknown(worker=event.worker))
            return None
        return worker if worker.epoch == event.epoch else None

    def _give_up(self, worker: Worker, reason: str, now: float) -> None:
        self._lose(worker, reason, now)
        self._effects.append(WorkerUnknown(worker=worker.peer))
        self._announce()

    def _announce(self) -> None:
        """Tells front ends what is served, if that changed."""
        service = self._fleet.service()
        if service != self._announced:
            self._announced = service
            self._effects.append(self.service_state())

    def service_state(self) -> ServiceChanged:
        """What front ends must know now."""
        service = self._announced
        return ServiceChanged(
            ready=service.ready,
            model=service.model,
            max_model_len=service.max_model_len,
            block_size=service.block_size,
        )

    # ---------------------------------------------------------------- time

    def _time_passed(self, event: ev.TimePassed, now: float) -> None:
        for worker in self._fleet.overdue(now):
            self._give_up(worker, f"step {worker.answered_step + 1} is overdue", now)
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, key = heapq.heappop(self._deadlines)
            request = self._requests.get(key)
            if request is not None and request.sequence == sequence:
                self._end(
                    request,
                    EndReason.DEADLINE,
                    now,
                    message="the deadline passed before the answer was complete",
                )
        self._end_unserved(now)
        self._end_stalled(now)

    def _end_unserved(self, now: float) -> None:
        if self._fleet.empty_since is None:
            return
        for request in self._waiting.requests():
            waited = now - max(request.arrival, self._fleet.empty_since)
            if waited > self._config.worker_wait_s:
                self._end(
                    request,
                    EndReason.NO_WORKER,
                    now,
                    message=f"no worker was there for {self._config.worker_wait_s:g} s; try again later",
                )

    def _end_stalled(self, now: float) -> None:
        for worker in self._fleet:
            rows = worker.rows
            for row in np.flatnonzero((rows.state == DECODE) & (rows.committed >= rows.allowed)).tolist():
                request = rows.requests[row]
                assert request is not None
                if request.starved_since is None:
                    request.starved_since = now
                    self._stalling[request.key] = request
        for key, request in list(self._stalling.items()):
            if request.starved_since is None or request.state is RequestState.FINISHED:
                del self._stalling[key]
            elif 0 < self._config.stall_timeout_s < now - request.starved_since:
                self._end(
                    request,
                    EndReason.STALLED,
                    now,
                    message=f"the reader took nothing for {self._config.stall_timeout_s:g} s",
                )

    def _shutdown_requested(self, event: ev.ShutdownRequested, now: float) -> None:
        for request in list(self._requests.values()):
            self._end(request, EndReason.SHUTDOWN, now, message="the service is shutting down")

    # ---------------------------------------------------------------- small helpers

    def _attempt_ended(self, request: Request, outcome: str) -> None:
        if request.traceparent:
            self._effects.append(
                AttemptEnded(frontend=request.key.frontend, stream=request.key.stream, outcome=outcome)
            )

    def _take_effects(self) -> list[Effect]:
        effects = self._effects
        self._effects = []
        return effects
