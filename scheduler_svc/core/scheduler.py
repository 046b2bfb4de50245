"""The state machine: one `handle` for everything that happens, one `plan` for what a worker does next.

It routes each event to the part that knows: `registry` owns the requests, `fleet` the workers, `frontends` who is told,
`planner` decides what a step holds and `commit` what its answer means.
"""

from collections.abc import Callable

from scheduler_svc.core import events as ev
from scheduler_svc.core.commit import settle
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import (
    AttemptPrefilled,
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
from scheduler_svc.core.errors import ProtocolViolationError
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.frontends import Frontends
from scheduler_svc.core.history import Story
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.registry import RequestRegistry
from scheduler_svc.core.request import RequestState
from scheduler_svc.core.stats import RequestStats, SchedulerStats, worker_stats
from scheduler_svc.core.step_clock import EARLY_S
from scheduler_svc.core.suspicion import CONDEMNED, took_part
from scheduler_svc.core.worker import Worker


class Scheduler:
    """The scheduler core. `incarnation` is a random 64-bit number that no earlier core had."""

    def __init__(self, config: CoreConfig, incarnation: int) -> None:
        self._config = config
        self._effects: list[Effect] = []
        self._frontends = Frontends(self._effects)
        self._fleet = Fleet(config, incarnation)
        self._announced = self._fleet.service()
        self._requests = RequestRegistry(config, self._fleet, self._effects)
        self._handlers: dict[type, Callable[..., None]] = {
            ev.FrontendJoined: self._frontend_joined,
            ev.FrontendLost: self._frontend_lost,
            ev.RequestArrived: self._request_arrived,
            ev.RequestCancelled: self._request_cancelled,
            ev.ResumeAsked: self._resume_asked,
            ev.RequestsDropped: self._requests_dropped,
            ev.LogsRestored: self._logs_restored,
            ev.StopMatched: self._stop_matched,
            ev.CreditGranted: self._credit_granted,
            ev.WorkerHello: self._worker_hello,
            ev.WorkerLost: self._worker_lost,
            ev.DrainRequested: self._drain_requested,
            ev.ResumeRequested: self._resume_requested,
            ev.WorkerCompiling: self._worker_compiling,
            ev.GrammarReported: self._grammar_reported,
            ev.StepDone: self._step_done,
            ev.TimePassed: self._time_passed,
            ev.ShutdownRequested: self._shutdown_requested,
        }

    # ---------------------------------------------------------------- the two entry points

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Takes one event in and returns what is to be done, in order."""
        self._fleet.time_passes(now)
        self._handlers[type(event)](event, now)
        return self.take_effects()

    def plan(self, peer: ev.Peer, now: float) -> Plan | None:
        """The next plan for a worker, or None: nothing to do, too early, or enough plans in flight.

        Effects of planning (preemptions, requests that can never run) are returned by `take_effects`.
        """
        worker = self._fleet.get(peer)
        if worker is None:
            return None
        due = worker.plan_due(self._config.max_plans_in_flight)
        if due is None or due > now + EARLY_S:
            return None
        requests = self._requests
        if not (worker.has_work or len(requests.waiting)):
            return None
        outcome = Planner(
            worker,
            list(self._fleet),
            requests.waiting,
            requests.tenants,
            requests.forecast,
            self._config,
            self._frontends.numbers,
            now,
        ).run()
        for refusal in outcome.refused:
            requests.end(refusal.request, refusal.reason, now, message=refusal.message)
        for request in outcome.wanted:
            self._effects.append(
                GrammarWanted(worker=peer, epoch=worker.epoch, key=request.grammar_key, grammar=request.grammar)
            )
        for request in outcome.starved:
            requests.requeue(request, now)
        for request in outcome.preempted:
            requests.displace(request, "preempted", f"preempted on {worker.worker_id}", now)
        for request in outcome.ending:
            requests.last_step_planned(request)
        for request, row in outcome.admitted:
            requests.admitted(request, worker, row, now)
        return outcome.plan

    def take_effects(self) -> list[Effect]:
        """Effects that planning has produced since the last call of `handle` or of this."""
        effects = self._effects.copy()
        self._effects.clear()
        return effects

    def next_plan_due(self, now: float) -> float | None:
        """The next time after `now` at which a plan becomes due by itself."""
        due = [worker.plan_due(self._config.max_plans_in_flight) for worker in self._fleet]
        return min((time for time in due if time is not None and time > now), default=None)

    def due_workers(self, now: float) -> list[ev.Peer]:
        """The workers whose plan is due, or so nearly that it may go out with others."""
        most, latest = self._config.max_plans_in_flight, now + EARLY_S
        return [worker.peer for worker in self._fleet if (due := worker.plan_due(most)) is not None and due <= latest]

    def workers(self) -> list[ev.Peer]:
        """The workers that may be planned for."""
        return [worker.peer for worker in self._fleet]

    def stats(self) -> SchedulerStats:
        """Figures for metrics."""
        return SchedulerStats(
            running=sum(worker.rows.num_running for worker in self._fleet),
            waiting=self._requests.num_waiting,
            frontends=len(self._frontends),
            ended=dict(self._requests.ended),
            workers=[worker_stats(worker) for worker in self._fleet],
        )

    def story(self, frontend: ev.Peer, stream: int) -> list[tuple[float, str]]:
        """What happened to a live request, with times."""
        request = self._requests.get(frontend, stream)
        return list(request.story) if request is not None else []

    def stories(self, request_id: str) -> list[Story]:
        """What happened to the requests of this id, live or ended lately."""
        return self._requests.stories(request_id)

    def requests(self, most: int) -> list[RequestStats]:
        """Figures of live requests, in order of arrival."""
        return self._requests.stats(most)

    def knows(self, identity: bytes) -> bool:
        """Whether a request with this identity is live, or a log of it is kept."""
        return self._requests.identified.knows(identity)

    def cancelling(self, request_id: str) -> list[ev.Event]:
        """The events that end the live requests of this id for good."""
        return [
            ev.RequestCancelled(frontend=request.key.frontend, stream=request.key.stream)
            if request.origin is None
            else ev.RequestsDropped(identities=(request.origin.identity,))
            for request in self._requests.find(request_id)
        ]

    def validate(self) -> None:
        """Checks every invariant that spans parts; for tests and simulation."""
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
            self._requests.arrive(event, now)
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
        again = self._fleet.get(event.worker)
        if again is not None:
            self._lose(again, "it said hello again", now, fatal=True)
        reason = self._fleet.refusal(event, model_in_use=bool(self._requests))
        if reason is not None:
            self._effects.append(WorkerRefused(worker=event.worker, reason=reason))
        else:
            # A process that cannot serve displaces nobody, whatever it calls itself.
            replaced = self._fleet.named(event.worker_id)
            if replaced is not None:
                self._lose(replaced, "another process serves under its name", now, fatal=True)
                self._effects.append(WorkerUnknown(worker=replaced.peer))
            worker = self._fleet.join(event)
            self._effects.append(
                WorkerWelcomed(worker=event.worker, epoch=worker.epoch, protocol_version=worker.protocol_version)
            )
        self._announce()

    def _worker_lost(self, event: ev.WorkerLost, now: float) -> None:
        worker = self._fleet.get(event.worker)
        if worker is not None:
            self._lose(worker, event.reason, now, fatal=not event.orderly)
            self._announce()

    def _lose(self, worker: Worker, reason: str, now: float, *, fatal: bool) -> None:
        """Ends a worker's epoch: what ran there waits again; `fatal` when it may have died of what it computed."""
        aboard = worker.aboard() if fatal else []
        is_alone = worker.dies_of() is not None
        left_behind = self._fleet.leave(worker, now)
        for request in left_behind:
            self._requests.displace(request, "worker lost", f"lost {worker.worker_id}: {reason}", now)
        if left_behind:
            ids = tuple(request.request_id for request in left_behind)
            self._effects.append(WorkerEmptied(worker_id=worker.worker_id, reason=reason, request_ids=ids))
        for request in aboard:
            is_condemned = took_part(request, alone=is_alone)
            request.note(now, f"in a fatal step: {request.fatal_steps}" + (", alone" if is_alone else ""))
            if is_condemned:
                self._requests.end(request, EndReason.POISON, now, message=CONDEMNED)

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
                self._requests.displace(worker.vacate(row), "moved", f"moved away from {worker.worker_id}", now)

    def _resume_requested(self, event: ev.ResumeRequested, now: float) -> None:
        worker = self._fleet.named(event.worker_id)
        if worker is not None:
            worker.draining = False
            self._announce()

    def _worker_compiling(self, event: ev.WorkerCompiling, now: float) -> None:
        worker = self._known(event)
        if worker is not None:
            worker.compiling_until = now + event.expected_s

    def _grammar_reported(self, event: ev.GrammarReported, now: float) -> None:
        worker = self._known(event)
        if worker is None or not worker.grammars.reported(event.key, usable=not event.failure) or not event.failure:
            return
        for request in self._requests:
            if request.grammar_key == event.key:
                self._requests.end(request, EndReason.INVALID, now, message=f"grammar: {event.failure}")

    def _step_done(self, event: ev.StepDone, now: float) -> None:
        worker = self._known(event)
        if worker is None:
            return
        try:
            settled = settle(worker, event, now)
        except ProtocolViolationError as error:
            self._give_up(worker, str(error), now, fatal=False)
            return
        if settled.num_prefill_tokens:
            worker.gate.prefill_measured(settled.duration)
        self._requests.forecast.step_measured(settled.num_tokens, settled.num_prefill_tokens, settled.duration)
        for request, index, of_prompt, scores in settled.scores:
            if request.origin is not None and not of_prompt:
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
        self._frontends.deliver(worker.rows, settled)
        worker.judge()
        for request in settled.prefilled:
            self._effects.append(AttemptPrefilled(frontend=request.key.frontend, stream=request.key.stream))
        for request, token in settled.stopped:
            self._requests.end(request, EndReason.STOP, now, stop_token_id=token)
        for request in settled.at_limit:
            self._requests.end(request, EndReason.LENGTH, now)
        for request, values in settled.embedded:
            self._requests.end(request, EndReason.EMBEDDED, now, embedding=values)
        for failed in settled.failed:
            if failed.request.state is not RequestState.FINISHED:
                self._requests.end(failed.request, EndReason.ROW_FAILED, now, message=failed.reason)
            # Whoever built on what the row wrote computes it again.
            for row in worker.distrust(failed.blocks):
                request = worker.vacate(row)
                worker.distrust(failed.blocks)
                self._requests.displace(request, "prefix failed", "the row that computed its prefix failed", now)

    def _known(self, event: ev.StepDone | ev.WorkerCompiling | ev.GrammarReported) -> Worker | None:
        """The worker of an event, or None when its epoch is over."""
        worker = self._fleet.get(event.worker)
        if worker is None:
            self._effects.append(WorkerUnknown(worker=event.worker))
            return None
        return worker if worker.epoch == event.epoch else None

    def _give_up(self, worker: Worker, reason: str, now: float, *, fatal: bool) -> None:
        self._lose(worker, reason, now, fatal=fatal)
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
            self._give_up(worker, f"step {worker.answered_step + 1} is overdue", now, fatal=True)
        self._requests.time_passed(now)

    def _shutdown_requested(self, event: ev.ShutdownRequested, now: float) -> None:
        for request in self._requests:
            self._requests.end(request, EndReason.SHUTDOWN, now, message="the service is shutting down")
