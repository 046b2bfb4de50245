"""Scheduler service: one loop around the core.

Each turn reads all frames that have arrived, advances the core's clock, plans for every worker whose plan is due, and
sends the results of the turn. Sockets are read before deadlines are checked, so that results which arrived during a
pause do not count as missing. Only the poll blocks.
"""

import math
import os
import socket as names
import time
from collections.abc import Iterator
from typing import NamedTuple

import zmq

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2
from scheduler_svc.admission_file import NO_SETTINGS, AdmissionSettings
from scheduler_svc.assembly import open_journal, protector, shown_settings, to_core_config
from scheduler_svc.collector import watch_collections
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.explanations import LiveExplanations
from scheduler_svc.frontend import link as frontend_link
from scheduler_svc.frontend.hub import FrontendHub
from scheduler_svc.journal.journal import Journal
from scheduler_svc.kv_events import KvEvents
from scheduler_svc.leader_lease import LeaderLease
from scheduler_svc.live_views import LiveViews
from scheduler_svc.metric_snapshots import MetricSnapshots
from scheduler_svc.metrics import Leadership, SchedulerMetrics
from scheduler_svc.operator import Operator
from scheduler_svc.recorder.recorder import Recorder, RecorderStats
from scheduler_svc.recorder.tape import RecordedScheduler
from scheduler_svc.standby.election import Election
from scheduler_svc.standby.leading import Standbys, StandbyStats
from scheduler_svc.standby.waiting import NO_PREDECESSOR, Succession
from scheduler_svc.tracing import SchedulerTracing
from scheduler_svc.worker import link as worker_link
from scheduler_svc.worker.hub import LOOK_INTERVAL_S, PING_INTERVAL_S, WorkerHub
from shared.config import SchedulerConfig, addresses
from shared.curve import DOMAINS, FRONTEND, SCHEDULER, STANDBY_DOMAIN, WORKER, AllowList, check_bind, load_keys
from shared.frames import FrameTooLargeError, MalformedFrameError
from shared.logging import get_logger, set_level
from shared.pulse import Pulse
from shared.sockets import is_readable, receive_from, wait_readable
from shared.telemetry import Telemetry
from shared.versions import UnsupportedVersionError

RECEIVING_S = 0.004
"""Maximum time to read frames from one socket before reading the other socket and planning."""
PLANNING_S = 0.008
"""Maximum time to make plans before the sockets are read again. The current plan is completed."""
TOGETHER_S = 0.0005
"""Maximum time for which a plan waits for others, so that several are sent together."""
GATHER_S = 0.001
"""Maximum time for which a busy loop waits for more results after the first one, so that one turn handles several."""
_GATHER_SHARE = 0.05
"""The same as a share of the shortest step in flight. The workers have another plan meanwhile."""
_MIN_GATHERED = 0.5
"""Minimum number of results that must be expected in this time."""
IDLE_INTERVAL_S = 0.5
"""Interval of pings and of polls of the worker processes while no request is live."""
SILENCE_WITH_STANDBY_S = 2.0
"""Maximum timeout of a worker that may find another leader, seconds."""
_SHORTEST_SILENCE_S = 1.0
_SILENCE_SHARE = 0.75
"""The same as a share of the duration of the lease, if there is one."""
YOUNG_S = 10.0
"""Time after its start in which a scheduler expects the workers of its predecessor, seconds."""
SETTLE_S = 0.25
"""Time for which a worker with retained KV waits for other workers of the predecessor, seconds. Otherwise it would
compute their requests again.
"""
LONGEST_SETTLE_S = 4.0
"""Maximum time for which the first worker with retained KV waits for all others and for the requests, seconds."""
_MOST_LEASES = 6
"""Additional number of leases for which a front end may be silent while frames wait to be read."""
STOPPED_S = 1.0
"""Time between two turns above which this process was stopped, so that another scheduler may lead, seconds."""
TURN_PARTS = ("snapshot", "results", "losses", "requests", "upkeep", "metrics", "plans", "messages")
"""The parts of a turn, in order."""
SHUTDOWN_FLUSH_S = 1.0
SHUTDOWN_LINGER_MS = 500
_FAULTS = {
    ef.EndReason.INVALID,
    ef.EndReason.NO_WORKER,
    ef.EndReason.ROW_FAILED,
    ef.EndReason.POISON,
    ef.EndReason.STALLED,
}
"""End reasons that are logged here. The front end logs every end, and an overload causes thousands of refusals."""

log = get_logger()


class _UnsentPlan(NamedTuple):
    """A plan that was made and not sent yet."""

    peer: ev.Peer
    worker_id: str
    """Name of the worker; empty if the worker is unknown."""
    step: int
    num_tokens: int
    frame: bytes
    began: float
    """Time at which planning began, s."""


class SchedulerService:
    """Owner of the sockets and the core; `run` serves until `stop` is called, from a signal handler for example."""

    def __init__(
        self,
        config: SchedulerConfig,
        telemetry: Telemetry,
        incarnation: int,
        admission: AdmissionSettings = NO_SETTINGS,
        recorder: Recorder | None = None,
        lease: LeaderLease | None = None,
        succession: Succession = NO_PREDECESSOR,
        election: Election | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self._config = config
        self._lease = lease
        self._leader_number = succession.number
        self._num_expected = succession.num_workers
        core_config = to_core_config(config, admission)
        self._recorder = recorder
        is_wanted = config.record_dir not in ("", "off")
        self._no_record = RecorderStats(writes=False) if is_wanted else None
        """Metrics without a recorder."""
        self._core = (
            Scheduler(core_config, incarnation)
            if recorder is None
            else RecordedScheduler(core_config, incarnation, recorder.tape)
        )
        self._telemetry = telemetry
        self._metrics = SchedulerMetrics(lambda: telemetry.spans_dropped)
        self._tracing = SchedulerTracing(telemetry, time.time_ns() - time.monotonic_ns(), config.trace_steps)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        keys = load_keys(config.keys, SCHEDULER)
        for setting in ("worker_address", "frontend_address", "standby_address"):
            if getattr(config, setting):
                check_bind(setting, getattr(config, setting), protected=keys is not None, insecure=config.insecure)
        domains = (*DOMAINS.values(), *([STANDBY_DOMAIN] if config.standby_address else []))
        self._allowed = AllowList(self._context, keys, domains) if keys is not None else None
        self._standbys: Standbys | None = None
        if config.standby_address or config.standby_of:
            self._standbys = Standbys(
                self._context,
                address=config.standby_address,
                others=addresses(config.standby_of),
                number=succession.number,
                is_synchronous=config.journal_sync == "standby",
                election=election,
                protect_server=protector(keys, SCHEDULER),
                protect_client=(lambda _socket: None) if keys is None else keys.protect_scheduler,
            )
        self._workers = WorkerHub(self._context, config.worker_address, protector(keys, WORKER))
        self._frontends = FrontendHub(
            self._context,
            config.frontend_address,
            incarnation=incarnation,
            lease_s=config.frontend_lease_s,
            protect=protector(keys, FRONTEND),
        )
        self._operator = Operator(
            self._core, apply=self._apply, set_log_level=self._set_log_level, settings=shown_settings(core_config)
        )
        self._explanations = LiveExplanations(recorder)
        wall_ns = time.time_ns() - time.monotonic_ns()
        self._views = LiveViews(recorder, self._frontends, self._core, wall_ns, config.policy, self._leadership)
        self._journal = open_journal(config, succession.found)
        if config.kv_events:
            check_bind("kv_events", config.kv_events, protected=False, insecure=config.insecure)
        self._kv_events = KvEvents(self._context, config.kv_events) if config.kv_events else None
        self._silence_s = config.worker_silence_s
        if self._standbys is not None:
            longest_s = SILENCE_WITH_STANDBY_S
            if election is not None:
                # Shortly before another scheduler can lead, so that workers wait for it and lose no time.
                longest_s = max(_SHORTEST_SILENCE_S, _SILENCE_SHARE * config.leader_lease_s)
            self._silence_s = min(config.worker_silence_s, longest_s)
        self._pulse = pulse or Pulse()
        self._ticked_at = self._looked_at = -math.inf
        self._gather_s = 0.0
        """Time for which to wait for more results after a wake-up, s."""
        self._num_results = 0
        """Number of results since the last tick."""
        self._started_at = time.monotonic()
        self._settled_at = 0.0
        """Time before which nothing is planned, because further workers may have the KV of requests; 0 for none."""
        self._settles_by = math.inf
        """Limit of `_settled_at`."""
        self._planned_at = 0.0
        """Time of the last planning."""
        self._gone: dict[ev.Peer, str] = {}
        """Unreachable workers with the reasons. They are dropped in the next turn, unless their Goodbye is read first.
        """
        self._unsent: list[_UnsentPlan] = []
        """Plans that were made in this turn and not sent yet, in order."""
        self._arriving: Iterator[bool] = iter(())
        """Handles the rest of a front end's frame, which was too long for one turn."""
        self._read_all_at = self._started_at
        """Time at which every frame that front ends had sent was handled."""
        self._arriving_at = 0.0
        """Time at which the events from front ends happen that are handled now, s."""
        self._snapshots = MetricSnapshots(self._frontends, self._families_in_parts)
        self._part_times = [self._metrics.turn_part(name) for name in TURN_PARTS]
        self._part_began = 0.0
        watch_collections(self._metrics.turn_part("collection").observe)
        self._stopping = False
        self._log_level = ""
        """Log level set by an operator; empty for none."""

    def stop(self) -> None:
        """Make `run` return after the current turn."""
        self._stopping = True

    @property
    def successor(self) -> int:
        """Leader number of the scheduler that leads instead of this one; 0 for none."""
        return 0 if self._standbys is None else self._standbys.successor

    def run(self) -> None:
        """Serve until `stop`, or until another scheduler leads.

        After that, front ends keep live requests, or the requests end with SHUTDOWN.
        """
        standbys, sockets = self._standbys, (self._workers.socket, self._frontends.socket)
        journal_descriptors: tuple[int, ...] = ()
        if self._journal is not None:
            journal_descriptors = self._journal.descriptors
            now = time.monotonic()
            self._apply(self._journal.restored, now)
        more, began = False, time.monotonic()
        while not (self._stopping or self.successor):
            if not more:
                descriptors = journal_descriptors + self._explanations.descriptors
                readable = sockets if standbys is None else (*sockets, *standbys.sockets)
                wake_at = self._wake_at()
                wait_readable(readable, wake_at - time.monotonic(), descriptors)
                # No plan is sent later because of this wait.
                if self._gather_s and (pause_s := min(self._gather_s, wake_at - time.monotonic())) > 0:
                    time.sleep(pause_s)
            last, began = began, time.monotonic()
            if standbys is not None:
                if began - last > STOPPED_S:
                    standbys.listen()
                standbys.read(began)
                if standbys.successor:
                    break
            more = self._turn()
            self._metrics.observe_turn(time.monotonic() - began)
        is_silent = standbys is not None and standbys.must_be_silent
        if not is_silent:
            self._frontends.leave()
        if self._config.on_stop == "end" and not self.successor:
            now = time.monotonic()
            self._apply(ev.ShutdownRequested(), now)
        if self._journal is not None:
            self._journal.commit()
        if standbys is not None and not is_silent:
            standbys.hand_over(self._journal, ends=bool(standbys.successor))
        if self._journal is not None:
            self._journal.close()
        # Send the computed tokens first, because writing the end of the record takes time. The lease may have ended
        # while standbys read the rest of the journal.
        if not is_silent and (standbys is None or standbys.may_send(time.monotonic())):
            self._frontends.drain(SHUTDOWN_FLUSH_S)
        if self._recorder is not None:
            self._recorder.close()

    def metric_families(self) -> list[link_pb2.MetricFamily]:
        return [family for family in self._families_in_parts() if family is not None]

    def _families_in_parts(self) -> Iterator[link_pb2.MetricFamily | None]:
        record = self._no_record if self._recorder is None else self._recorder.stats
        standbys = None if self._standbys is None else self._standbys.stats(self._journal)
        leadership = Leadership(self._leader_number, self._lease, standbys)
        return self._metrics.in_parts(self._core.stats(), self._journal, record, leadership)

    def _leadership(self) -> admin_pb2.Leadership | None:
        if self._standbys is not None:
            stats = self._standbys.stats(self._journal)
        elif self._lease is not None:
            ready = int(self._lease.has_standby)
            stats = StandbyStats(ready=ready, connected=ready)
        else:
            return None
        return admin_pb2.Leadership(
            leader=f"{names.gethostname()}-{os.getpid()}",
            leader_number=self._leader_number,
            seconds=time.monotonic() - self._started_at,
            ready_standbys=stats.ready,
            other_standbys=stats.connected - stats.ready,
            lag_bytes=stats.lag_bytes,
        )

    def _part_done(self, part: int) -> None:
        """Record the time of a part of the turn, which ends now."""
        now = time.monotonic()
        self._part_times[part].observe(now - self._part_began)
        self._part_began = now

    def close(self) -> None:
        """Close the sockets."""
        self._explanations.close()
        self._workers.close()
        if self._kv_events is not None:
            self._kv_events.close()
        # ZeroMQ is still sending the frames that were just flushed.
        is_silent = self._standbys is not None and self._standbys.must_be_silent
        self._frontends.socket.close(linger=0 if is_silent else SHUTDOWN_LINGER_MS)
        if self._standbys is not None:
            self._standbys.close()
        if self._allowed is not None:
            self._allowed.close()
        self._context.term()

    def _wake_at(self) -> float:
        # Include plans that became due during the last turn.
        due = self._core.next_plan_due(self._planned_at)
        wake_at = min(self._tick_at(), self._look_at())
        if self._standbys is not None:
            wake_at = min(wake_at, self._standbys.wake_at)
        if self._settled_at > self._planned_at:
            return min(wake_at, self._settled_at)
        return wake_at if due is None else min(wake_at, due)

    def _tick_at(self) -> float:
        return self._ticked_at + (IDLE_INTERVAL_S if self._core.is_idle else PING_INTERVAL_S)

    def _look_at(self) -> float:
        return self._looked_at + (IDLE_INTERVAL_S if self._core.is_idle else LOOK_INTERVAL_S)

    def _gathering_s(self, elapsed_s: float) -> float:
        """Return how long to wait for more results after a wake-up.

        A turn has a fixed cost. If many workers send results all the time, and each has another plan, a short wait
        lets one turn handle several results.
        """
        rate, self._num_results = self._num_results / elapsed_s, 0
        if self._config.max_plans_in_flight < 2:
            return 0.0
        gather_s = min(GATHER_S, _GATHER_SHARE * self._core.shortest_step_s())
        return gather_s if rate * gather_s >= _MIN_GATHERED else 0.0

    def _turn(self) -> bool:
        """Run one turn; return whether the next turn must follow immediately."""
        self._part_began = time.monotonic()
        if self._recorder is not None:
            self._recorder.turn(self._core, self._part_began)
        self._part_done(0)
        more = self._take_in_results()
        self._part_done(1)
        self._lose_gone(time.monotonic())
        self._part_done(2)
        has_requests = self._take_in_requests()
        more |= has_requests
        self._part_done(3)
        now = time.monotonic()
        if now >= self._look_at():
            self._looked_at = now
            self._gone |= dict.fromkeys(self._workers.dying(), "its process is dying")
        if now >= self._tick_at():
            self._gather_s = self._gathering_s(now - self._ticked_at)
            self._ticked_at = now
            self._tick(now)
            self._pulse.beat()
        for peer, reply in self._explanations.replies(now):
            self._frontends.outgoing(peer).add_reply(reply)
        self._part_done(4)
        if self._snapshots:
            more |= self._snapshots.proceed(now)
            self._part_done(5)
        self._planned_at = now
        # After a takeover, requests are read first, because a front end that waits too long reconnects.
        if now >= self._settled_at and not (has_requests and now < self._settles_by < math.inf):
            more |= self._plan_for(self._core.due_workers(now), now)
        self._part_done(6)
        written, durable = 0, 0.0
        if self._journal is not None:
            self._journal.commit()
            written, durable = self._journal.written, self._journal.durable
        if self._standbys is not None:
            if not self._standbys.may_send(time.monotonic()):
                return False
            self._standbys.send(self._journal, now, num_workers=len(self._workers))
            if self._config.journal_sync == "standby":
                durable = min(durable, self._standbys.acknowledged())
        for peer, reason in self._frontends.flush(written, durable).items():
            self._lose_frontend(peer, reason, time.monotonic())
        self._part_done(7)
        return more or bool(self._gone)

    def _take_in_results(self) -> bool:
        """Read workers' frames for a limited time; return whether some may be left."""
        socket = self._workers.socket
        if not is_readable(socket):  # Checking is cheaper than the exception for receiving from an empty socket.
            return False
        started = now = time.monotonic()
        while now - started < RECEIVING_S:
            frame = receive_from(socket)
            if frame is None:
                return False
            peer, payload = frame
            now = time.monotonic()
            try:
                self._worker_frame(peer, payload, now)
            except MalformedFrameError as error:
                self._malformed(peer, error)
        return True

    def _take_in_requests(self) -> bool:
        """Read front ends' frames for a limited time; return whether some may be left.

        A frame may contain hundreds of requests. If the time is over, the next turn continues with the rest of it.
        """
        socket = self._frontends.socket
        self._arriving_at = started = now = time.monotonic()
        while now - started < RECEIVING_S:
            if not next(self._arriving, False):
                frame = receive_from(socket) if is_readable(socket) else None
                if frame is None:
                    self._read_all_at = now
                    return False
                self._arriving_at = time.monotonic()
                self._arriving = self._frontend_frame(*frame)
            now = time.monotonic()
        return True

    def _malformed(self, peer: ev.Peer, error: MalformedFrameError) -> None:
        self._metrics.malformed_frames += 1
        if self._metrics.malformed_frames == 1:
            text = "malformed frame dropped; further ones are counted without a log line"
            log.warning(text, peer=peer.decode(errors="replace"), error=str(error))

    # ---------------------------------------------------------------- workers

    def _worker_frame(self, peer: ev.Peer, payload: bytes, now: float) -> None:
        try:
            event, timings = worker_link.decode(peer, payload)
        except UnsupportedVersionError as error:
            log.warning("refused a worker's connection", worker=peer.decode(errors="replace"), reason=str(error))
            self._workers.try_send(peer, worker_link.encode_refused(str(error)))
            return
        match event:
            case ev.StepDone():
                self._num_results += 1
                self._pulse.served()
                self._tracing.step_answered(peer, event.epoch, event.step, now)
                worker_id = self._workers.worker_id(peer)
                if worker_id is not None and timings is not None:
                    self._metrics.observe_step(worker_id, event.step, timings, now)
                if self._recorder is not None:
                    self._recorder.tape.timings = timings
            case ev.WorkerHello():
                self._gone.pop(peer, None)
                if event.retained and now - self._started_at < YOUNG_S:
                    self._settles_by = min(self._settles_by, now + LONGEST_SETTLE_S)
                    self._settled_at = min(now + SETTLE_S, self._settles_by)
                self._tracing.worker_lost(peer, now)  # After a new Hello the worker sends no results for earlier plans.
                self._metrics.workers_joined += 1
                self._workers.add(peer, event.worker_id, now, process=event.process)
            case ev.WorkerLost():
                self._forget_worker(peer, event.reason, now, orderly=event.orderly)
        self._apply(event, now)
        # Only now, because the core may have refused this worker, or replaced an earlier one of its name.
        if self._settled_at > now and 0 < self._num_expected <= len(self._workers):
            self._settled_at = now

    def _plan_for(self, peers: list[ev.Peer], now: float) -> bool:
        """Make and send the plans that are due; return whether some are left for the next turn."""
        for peer in peers:
            self._plan(peer)
            planned = time.monotonic()
            if self._unsent and planned - self._unsent[0].began > TOGETHER_S:
                self._send_plans()
            if planned - now > PLANNING_S:
                # The other workers stay due, longest due first. Read newly arrived frames first.
                break
        self._send_plans()
        self._core.tidy()
        return bool(peers) and peer is not peers[-1]

    def _plan(self, peer: ev.Peer) -> None:
        """Make the plans of a worker that are due."""
        core, worker_id = self._core, self._workers.worker_id(peer) or ""
        while True:
            now = time.monotonic()
            plan, effects = core.plan(peer, now)
            # Close the spans of attempts that planning ended before new spans are opened.
            if effects:
                self._carry_out(effects, now)
            if plan is None:
                return
            if self._kv_events is not None and (worker := core.worker(peer)) is not None:
                self._kv_events.changes.observe(worker, [admission.row for admission in plan.admissions])
            for admission in plan.admissions:
                log.debug(
                    "request admitted",
                    request_id=admission.spec.request_id,
                    worker=worker_id,
                    row=admission.row,
                    step=plan.step,
                )
            step_traceparent, attempts = self._tracing.plan_issued(plan, worker_id, now)
            planned = core.worker(peer) if plan.admissions else None
            try:
                frame = worker_link.encode_plan(
                    plan,
                    step_traceparent=step_traceparent,
                    attempt_traceparents=attempts,
                    fingerprint=planned.model.fingerprint if planned is not None and planned.prefixes.enabled else None,
                )
            except FrameTooLargeError as error:
                # The core assumes that its plan is executed, so the worker must begin a new epoch. If one request made
                # the plan too large, that request is planned alone after two failures.
                log.error("plan not sent: it is too large", worker=worker_id, error=str(error))
                self._send_plans()
                self._workers.try_send(peer, worker_link.UNKNOWN)
                self._gone[peer] = str(error)
                return
            self._unsent.append(_UnsentPlan(peer, worker_id, plan.step, plan.num_tokens, frame, now))
            if not core.is_due(peer, now):
                return

    def _send_plans(self) -> None:
        """Send the plans that were made. One wake-up of ZeroMQ's thread then serves several of them."""
        if self._standbys is not None and not self._standbys.may_send(time.monotonic()):
            self._unsent.clear()
        for plan in self._unsent:
            if self._send_to_worker(plan.peer, plan.frame, plan.began) and plan.worker_id:
                self._metrics.plan_sent(plan.worker_id, plan.step, plan.num_tokens, plan.began, time.monotonic())
        self._unsent.clear()

    def _send_to_worker(self, peer: ev.Peer, frame: bytes, now: float) -> bool:
        trouble = self._workers.send(peer, frame, now)
        if trouble is not None:
            self._gone[peer] = trouble
        return trouble is None

    def _lose_worker(self, peer: ev.Peer, reason: str, now: float) -> None:
        self._forget_worker(peer, reason, now)
        self._apply(ev.WorkerLost(worker=peer, reason=reason), now)

    def _lose_gone(self, now: float) -> None:
        """Drop the workers that were unreachable in the last turn, except those that have said Goodbye since."""
        gone, self._gone = self._gone, {}
        for peer, reason in gone.items():
            if self._workers.worker_id(peer) is not None:
                self._lose_worker(peer, reason, now)

    def _forget_worker(self, peer: ev.Peer, reason: str, now: float, *, orderly: bool = False) -> None:
        worker_id = self._workers.worker_id(peer)
        self._metrics.workers_lost += worker_id is not None and not orderly
        self._workers.forget(peer, reason, orderly=orderly)
        self._tracing.worker_lost(peer, now)
        # Another process may have taken the worker's name.
        if worker_id is not None and not self._workers.knows(worker_id):
            self._metrics.forget_worker(worker_id)

    # ---------------------------------------------------------------- front ends

    def _frontend_frame(self, peer: ev.Peer, payload: bytes) -> Iterator[bool]:
        """Handle a front end's frame; yield True after each event, so that the caller may continue later."""
        try:
            incoming = frontend_link.decode(peer, payload, self._arriving_at)
        except UnsupportedVersionError as error:
            self._frontends.refuse(peer, str(error))
            return
        except MalformedFrameError as error:
            self._malformed(peer, error)
            return
        if not self._frontends.heard(peer, self._arriving_at, version=incoming.hello):
            self._frontends.send_unknown(peer)
            return
        for event in incoming.events:
            self._apply(event, self._arriving_at)
            yield True
            if peer not in self._frontends:
                return  # It was lost before the rest of its frame was handled.
        now = self._arriving_at
        if self._recorder is not None:
            for measured in incoming.request_reports:
                self._recorder.reported(peer, measured, now)
        for traced in incoming.traced:
            story = self._core.story(peer, traced.stream)
            if story is not None:
                self._tracing.rebuild(story, traced.traceparent, now)
        for refusal in incoming.refused:
            self._metrics.malformed_frames += 1
            log.warning("invalid submission refused", request_id=refusal.request_id, error=refusal.message)
        self._carry_out([*incoming.refused], now)
        if incoming.hello or incoming.report is not None:
            # The state is also sent in response to every report, as a heartbeat of the core.
            self._frontends.outgoing(peer).set_state(self._core.service_state(), self._log_level, self._leader_number)
        if incoming.report is not None:
            self._frontends.set_report(peer, incoming.report)
        if incoming.snapshot_request:
            self._snapshots.add(peer, incoming.snapshot_request)
        for request in incoming.operator_requests:
            reply = self._operate(peer, request, now)
            if reply is not None:
                self._frontends.outgoing(peer).add_reply(reply)
        if incoming.ended_orders:
            self._views.end(peer, incoming.ended_orders)
            self._explanations.end(peer, incoming.ended_orders)
        if incoming.goodbye:
            self._lose_frontend(peer, "goodbye", now, orderly=True)

    def _operate(self, peer: ev.Peer, request: link_pb2.OperatorRequest, now: float) -> link_pb2.OperatorReply | None:
        """Handle an operator request; return None if the reply follows later."""
        if LiveExplanations.asked(request):
            return self._explanations.ask(peer, request, now)
        if LiveViews.asked(request):
            return self._views.ask(peer, request)
        return self._operator.reply(request, now)

    def _apply(self, event: ev.Event, now: float) -> None:
        self._carry_out(self._core.handle(event, now), now)

    def _set_log_level(self, level: str) -> str:
        """Set the log level of all processes; return the previous level of this process."""
        self._log_level = level
        before = set_level(level)
        log.info("log level", level=level, before=before)
        self._workers.set_log_level(level)
        self._ticked_at = -math.inf  # Send pings in this turn, before the response and any later plan.
        for outgoing in self._frontends.everyone():
            outgoing.set_state(self._core.service_state(), level, self._leader_number)
        return before

    def _lose_frontend(self, peer: ev.Peer, reason: str, now: float, *, orderly: bool = False) -> None:
        self._frontends.forget(peer, reason, orderly=orderly)
        self._views.forget(peer)
        self._explanations.forget(peer)
        self._apply(ev.FrontendLost(frontend=peer), now)

    # ---------------------------------------------------------------- time and outgoing messages

    def _tick(self, now: float) -> None:
        # A front end is not silent while its frames wait here. If the scheduler is overloaded, some frames always wait.
        longest_s = _MOST_LEASES * self._config.frontend_lease_s
        for peer in self._frontends.expired(max(self._read_all_at, now - longest_s)):
            self._lose_frontend(peer, "its lease expired", now)
        for outgoing in self._frontends.neglected(now):
            outgoing.set_state(self._core.service_state(), self._log_level, self._leader_number)
        self._gone |= dict.fromkeys(self._workers.ping(now), "its connection was closed")
        self._views.publish(now)
        if self._kv_events is not None:
            self._kv_events.publish(self._metrics.model, self._frontends.names(), self._core.epochs())
        if self._allowed is not None:
            self._allowed.refresh()
        self._apply(ev.TimePassed(), now)
        self._telemetry.push_metrics(self.metric_families)

    def _carry_out(self, effects: list[ef.Effect], now: float) -> None:
        journal = self._journal
        for effect in effects:
            if journal is not None:
                journal.note(effect)
            match effect:
                case ef.TokensReady():
                    self._frontends.outgoing(effect.frontend).add_tokens(effect)
                case ef.ResumeAnswered():
                    self._frontends.outgoing(effect.frontend).add_resume(effect)
                case ef.ScoresReady():
                    self._frontends.outgoing(effect.frontend).add_scores(effect)
                case ef.RequestEnded():
                    _log_end(effect)
                    self._frontends.outgoing(effect.frontend).add_end(effect)
                case ef.ServiceChanged():
                    log.info("service state", ready=effect.ready, max_model_len=effect.max_model_len)
                    self._metrics.model = "" if effect.model is None else effect.model.name
                    for outgoing in self._frontends.everyone():
                        outgoing.set_state(effect, self._log_level, self._leader_number)
                    if journal is not None and effect.model is not None:
                        self._drop_other_models(journal, effect.model.fingerprint, now)
                case ef.FrontendUnknown():
                    self._frontends.send_unknown(effect.frontend)
                case ef.WorkerWelcomed():
                    self._welcome(effect, now)
                case ef.WorkerRefused():
                    self._workers.try_send(effect.worker, worker_link.encode_refused(effect.reason))
                    self._forget_worker(effect.worker, f"refused: {effect.reason}", now)
                case ef.WorkerUnknown():
                    self._workers.try_send(effect.worker, worker_link.UNKNOWN)
                    self._forget_worker(effect.worker, "the scheduler dropped it", now)
                case ef.WorkerEmptied():
                    log.warning(
                        "worker lost; its requests wait for another worker",
                        worker=effect.worker_id,
                        reason=effect.reason,
                        request_ids=effect.request_ids,
                    )
                case ef.GrammarWanted():
                    frame = worker_link.encode_prepare_grammar(
                        effect.epoch, key=effect.key, grammar=effect.grammar, drop=effect.drop
                    )
                    self._send_plans()  # Send first, because earlier plans may use a grammar that this frame drops.
                    self._send_to_worker(effect.worker, frame, now)
                case ef.DiskJobWanted():
                    self._send_to_worker(effect.worker, worker_link.encode_disk_job(effect.epoch, effect.job), now)
                case ef.AttemptPrefilled():
                    self._tracing.attempt_prefilled((effect.frontend, effect.stream), now)
                case ef.AttemptEnded():
                    self._tracing.attempt_ended((effect.frontend, effect.stream), effect.outcome, now)

    def _drop_other_models(self, journal: Journal, fingerprint: str, now: float) -> None:
        identities = journal.of_other_models(fingerprint)
        if identities:
            log.warning("requests of another model dropped from the journal", requests=len(identities))
            self._apply(ev.RequestsDropped(identities=identities), now)

    def _welcome(self, effect: ef.WorkerWelcomed, now: float) -> None:
        self._workers.welcomed(effect.worker, effect.epoch)
        frame = worker_link.encode_welcome(
            effect.epoch,
            max_in_flight=self._config.max_plans_in_flight,
            silence_s=self._silence_s,
            version=effect.protocol_version,
            leader_number=self._leader_number,
        )
        self._send_to_worker(effect.worker, frame, now)


def _log_end(effect: ef.RequestEnded) -> None:
    """Log the end of a request if it is a fault."""
    if effect.reason in _FAULTS:
        log.warning("request failed", request_id=effect.request_id, reason=effect.reason.value, detail=effect.message)
