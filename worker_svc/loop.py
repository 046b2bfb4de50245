"""Worker loop: passes plans from the link to the engine and results back, until `stop`.

The loop keeps as many steps launched as the scheduler and the device allow. It also handles every error that ends an
epoch: it drops all rows and sends a new Hello. All log lines from here on carry the epoch and the step.
"""

import threading
import time
from collections import deque

from structlog.contextvars import bind_contextvars, unbind_contextvars

from shared.logging import LEVELS, get_logger, set_level
from shared.pulse import Pulse
from worker_svc.device.sensors import DeviceMonitor
from worker_svc.execution.engine import Engine
from worker_svc.interface.errors import PlanError
from worker_svc.interface.grammar import GrammarFailureCause, GrammarReport, GrammarRequest
from worker_svc.interface.result import StepResult
from worker_svc.link.connection import Link
from worker_svc.link.session import (
    DiskJobArrived,
    GrammarRequested,
    HelloReason,
    LogLevelWanted,
    Lost,
    PlanArrived,
    RefusedForGood,
    Welcomed,
)
from worker_svc.memory.disk_tier import DiskTier
from worker_svc.ranks.commands import Followers
from worker_svc.ranks.group import RankLostError
from worker_svc.rows.retained import Retained

_IDLE_POLL_MS = 250
"""Maximum wait for a frame while idle, which limits the delay until a signal or a timeout is handled."""
_REPORT_POLL_MS = 1
"""Maximum wait while a grammar is being compiled or blocks are copied to or from disk. It limits the delay of reports.
"""
_BUSY_WAIT_S = 20e-6
"""Pause between two polls of an asynchronous device and the socket."""


class RefusedError(Exception):
    """The scheduler refused this worker for good."""


class WorkerLoop:
    """Loop that runs one engine over one link."""

    def __init__(
        self,
        link: Link,
        engine: Engine,
        pulse: Pulse,
        followers: Followers,
        monitor: DeviceMonitor | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        self._link = link
        self._pulse = pulse
        self._engine = engine
        self._followers = followers
        self._disk = disk
        self._monitor = monitor
        """Adds energy to results; None if the device's sensors cannot be read."""
        self._stop = threading.Event()
        self._waiting: deque[tuple[PlanArrived, int]] = deque()
        self._max_launched = 0
        self._retained: tuple[Retained, ...] = ()
        """What the blocks contain from an earlier session, while no plan of this session was launched."""
        self._has_launched = False

    def stop(self) -> None:
        """Make `run` finish the steps in flight and return. May be called from a signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            RefusedError: the scheduler refused this worker for good.
            RankLostError: a follower was lost, or a step failed on one of several ranks.
        """
        self._link.open()
        while not self._stop.is_set():
            self._pulse.beat()
            self._followers.beat()
            lost = self._receive() or self._step()
            if lost is not None:
                self._reconnect(lost)
        lost = self._collect_all()
        self._link.close("shutting down" if lost is None else lost.reason)

    def _receive(self) -> Lost | None:
        """Handle pending events; if idle, wait for the first one."""
        idle = not self._waiting and self._engine.num_in_flight == 0
        self._report_grammars()
        self._report_disk()
        for event in self._link.receive(self._idle_poll_ms() if idle else 0):
            match event:
                case PlanArrived():
                    self._waiting.append((event, time.time_ns()))
                case Welcomed(epoch, max_in_flight, version):
                    self._max_launched = min(max_in_flight, self._engine.max_in_flight)
                    if self._disk is not None:
                        self._disk.begin_session()
                    bind_contextvars(epoch=f"{epoch:016x}")
                    get_logger().info("welcomed", max_in_flight=max_in_flight, protocol_version=version)
                case GrammarRequested(request):
                    self._prepare_grammar(request)
                case DiskJobArrived(job):
                    if self._disk is not None:
                        self._disk.submit(job)
                case LogLevelWanted(level) if level in LEVELS:
                    set_level(level)
                case RefusedForGood(reason):
                    raise RefusedError(reason)
                case Lost():
                    return event
        return None

    def _idle_poll_ms(self) -> int:
        grammars = self._engine.grammars
        is_busy = (grammars is not None and grammars.pending) or (self._disk is not None and self._disk.is_busy)
        return _REPORT_POLL_MS if is_busy else _IDLE_POLL_MS

    def _prepare_grammar(self, request: GrammarRequest) -> None:
        if self._engine.grammars is not None:
            self._engine.grammars.prepare(request)
        else:
            failure = "this worker's model has no tokenizer that supports grammars"
            report = GrammarReport(request.grammar.key, failure, GrammarFailureCause.WORKER)
            self._link.send_grammar_report(report)

    def _report_grammars(self) -> None:
        if self._engine.grammars is not None:
            for report in self._engine.grammars.take_reports():
                self._link.send_grammar_report(report)

    def _report_disk(self) -> None:
        if self._disk is None:
            return
        while (report := self._disk.next_report()) is not None and self._link.send_disk_report(report):
            self._disk.report_sent()

    def _step(self) -> Lost | None:
        """Launch waiting plans while the device has room, and send the result of a finished step."""
        try:
            while self._waiting and self._engine.num_in_flight < self._max_launched:
                arrived, received_unix_ns = self._waiting.popleft()
                plan = arrived.plan
                bind_contextvars(step=plan.step)
                for admission in plan.admissions:
                    get_logger().debug(
                        "row admitted",
                        request_id=admission.request_id,
                        row=admission.row,
                        computed=admission.num_computed_tokens,
                    )
                self._has_launched = True
                self._followers.launch(arrived.frame)
                self._engine.launch(plan, received_unix_ns)
            if self._engine.ready():
                bind_contextvars(step=self._engine.oldest_step)
                lost = self._link.send_result(self._collect())
                self._followers.collected()
                self._pulse.served()
                return lost
        except PlanError as error:
            return Lost(f"invalid plan: {error}", HelloReason.PROTOCOL_ERROR)
        except Exception as error:
            if self._followers:
                # Every rank must exit, because the other ranks may be waiting for this one within the step.
                raise RankLostError(f"a step failed on rank 0: {type(error).__name__}: {error}") from error
            # After any error, the scheduler can recompute the rows from their tokens.
            get_logger().error("step failed", exc_info=error)
            return Lost(f"step failed: {type(error).__name__}", HelloReason.STEP_FAILED)
        if self._engine.num_in_flight:
            time.sleep(_BUSY_WAIT_S)
        return None

    def _collect(self) -> StepResult:
        result = self._engine.collect()
        return result if self._monitor is None else self._monitor.measured(result)

    def _collect_all(self) -> Lost | None:
        """Send the results of all steps in flight before shutdown."""
        while self._engine.num_in_flight:
            bind_contextvars(step=self._engine.oldest_step)
            try:
                lost = self._link.send_result(self._collect())
            except Exception as error:
                get_logger().error("last step before shutdown failed", exc_info=error)
                return Lost("last step before shutdown failed", HelloReason.STEP_FAILED)
            if lost is not None:
                return lost
        return None

    def _reconnect(self, lost: Lost) -> None:
        get_logger().warning("session lost; reconnecting", reason=lost.reason)
        unbind_contextvars("epoch", "step")
        self._waiting.clear()
        if lost.hello_reason is not HelloReason.SESSION_LOST:
            self._retained = ()
        elif self._has_launched:
            self._retained = self._engine.retained()
        self._has_launched = False
        if self._disk is not None:
            self._disk.reset()
        self._engine.reset()
        self._followers.reset()
        self._link.open(lost.hello_reason, self._retained)
