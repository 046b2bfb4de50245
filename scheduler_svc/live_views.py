"""Live views: streams of the recorded steps to watching operators, in parts.

The recorder's thread builds the parts, and the loop forwards them at its ticks together with the current load. If a
front end is slow, the part is dropped, and the next part contains the number of dropped steps. Without views, no parts
are built.

Queues and KV blocks belong to the core, so the loop takes bounded snapshots of them, twice per second and only for
views that requested them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.lifecycle.tables import BlockMap, Blocks, Queued, Tables
from scheduler_svc.core.queueing.sessions import ShownSession
from scheduler_svc.core.requests.request import RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.frontend.hub import FrontendHub
from scheduler_svc.frontend.link import error_reply
from scheduler_svc.operator import to_worker
from scheduler_svc.present_limit import present_limit
from scheduler_svc.recorder.recorder import Recorder
from scheduler_svc.recorder.step_view import RequestNumbers
from shared.errors import (
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    QuireError,
    UnsupportedMethodError,
)

MAX_VIEWS = 8
_TABLES_INTERVAL_S = 0.5
_SLACK_S = 0.05
"""Tolerance for ticks that come early, because snapshots are taken only at ticks, s."""


@dataclass(slots=True)
class _View:
    tables: bool = False
    """Whether the view includes the queues and the blocks."""
    dropped: int = 0
    """Steps that were dropped since the last part."""


class LiveViews:
    """The views of all front ends."""

    def __init__(
        self,
        recorder: Recorder | None,
        frontends: FrontendHub,
        core: Scheduler,
        wall_ns: int,
        policy: str,
        leadership: Callable[[], admin.Leadership | None] = lambda: None,
    ) -> None:
        """Create without views.

        Args:
            recorder: makes the parts; None if there are no views.
            frontends: carries the parts.
            core: the core, which is only read here.
            wall_ns: wall clock at time 0 of the core's clock, ns.
            policy: the order of admission.
            leadership: returns the leader and its standbys; None without standbys.
        """
        self._recorder = recorder
        self._frontends = frontends
        self._core = core
        self._wall_ns = wall_ns
        self._policy = policy
        self._leadership = leadership
        self._tables_due = 0.0
        self._views: dict[tuple[Peer, int], _View] = {}

    @staticmethod
    def asked(request: link_pb2.OperatorRequest) -> bool:
        return request.HasField("call") and request.call.Is(admin.WatchStepsRequest.DESCRIPTOR)

    def ask(self, peer: Peer, request: link_pb2.OperatorRequest) -> link_pb2.OperatorReply:
        """Begin a view; return the reply, which is a confirmation or an error."""
        try:
            asked = admin.WatchStepsRequest.FromString(request.call.value)
            if self._recorder is None:
                raise UnsupportedMethodError("watch: the scheduler keeps no record; start it with --record-dir")
            if self._recorder.tape.is_off:
                raise UnsupportedMethodError("watch: the scheduler has stopped recording; see its log, and restart it")
            if len(self._views) >= MAX_VIEWS:
                raise OverloadedError(
                    f"watch: the limit of {MAX_VIEWS} live views is reached; close another live view first"
                )
        except DecodeError:
            return error_reply(request.number, InvalidRequestError(FieldViolation("request", "not a valid message")))
        except QuireError as error:
            return error_reply(request.number, error)
        self._views[peer, request.number] = _View(asked.tables)
        self._recorder.watch(True)
        reply = link_pb2.OperatorReply(number=request.number)
        reply.response.Pack(admin.WatchStepsResponse())
        return reply

    def end(self, peer: Peer, numbers: Iterable[int]) -> None:
        """End views of a front end."""
        for number in numbers:
            self._views.pop((peer, number), None)
        self._stop_if_idle()

    def forget(self, peer: Peer) -> None:
        """End all views of a front end that is lost."""
        self._views = {key: view for key, view in self._views.items() if key[0] != peer}
        self._stop_if_idle()

    def publish(self, now: float) -> None:
        """Forward the parts that the recorder has made since the last call."""
        if not self._views or self._recorder is None:
            return
        if self._recorder.views_failed:
            self._fail_all()
            return
        for part in self._recorder.take_views():
            if part.HasField("load"):
                self._fill(part.load, now)
            steps, data = len(part.steps) + part.dropped_steps, part.SerializeToString()
            for (peer, number), view in self._views.items():
                response = data
                if view.dropped:
                    # Protobuf merges concatenated messages, so the last value of a numeric field wins.
                    dropped = part.dropped_steps + view.dropped
                    response += admin.WatchStepsResponse(dropped_steps=dropped).SerializeToString()
                message = link_pb2.View(number=number, response=response, steps=steps + view.dropped)
                view.dropped = 0 if self._frontends.offer(peer, message) else message.steps
        self._publish_tables(now)

    def _publish_tables(self, now: float) -> None:
        """Send a snapshot to the views that requested it, if it is due. A dropped snapshot is not repeated."""
        if now < self._tables_due - _SLACK_S:
            return
        asking = [key for key, view in self._views.items() if view.tables]
        if not asking or self._recorder is None:
            return
        self._tables_due = now + _TABLES_INTERVAL_S
        part = admin.WatchStepsResponse()
        part.tables.CopyFrom(to_tables(self._core.tables(), self._recorder.numbers, self._policy, now))
        part.tables.time.FromNanoseconds(self._wall_ns + round(now * 1e9))
        data = part.SerializeToString()
        for peer, number in asking:
            self._frontends.offer(peer, link_pb2.View(number=number, response=data))

    def _fail_all(self) -> None:
        """End all views with an error. A view requested later starts over."""
        for peer, number in self._views:
            error = NotReadyError("watch: the view failed; see the scheduler's log, and watch again")
            self._frontends.outgoing(peer).add_reply(error_reply(number, error))
        self._views.clear()
        self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        if not self._views and self._recorder is not None:
            self._recorder.watch(False)

    def _fill(self, load: admin.SchedulerLoad, now: float) -> None:
        stats = self._core.stats()
        load.time.FromNanoseconds(self._wall_ns + round(now * 1e9))
        load.running_requests, load.waiting_requests = stats.running, stats.waiting
        load.waiting_by_reason.update(stats.waiting_by_reason)
        load.workers.extend(map(to_worker, stats.workers))
        pressure = self._core.pressure(now)
        limit = present_limit(pressure, load.rates.itl.p50)
        load.limit.kind, load.limit.state = limit.kind.value, limit.state
        load.limit.remedy, load.limit.waits = limit.remedy, limit.waits
        load.limit.oldest_seconds = pressure.oldest_s
        leadership = self._leadership()
        if leadership is not None:
            load.leadership.CopyFrom(leadership)


def to_tables(tables: Tables, numbers: RequestNumbers, policy: str, now: float) -> admin.SchedulerTables:
    """Convert a snapshot of the core to the message for operators.

    Args:
        tables: the snapshot.
        numbers: the numbers of requests in live views.
        policy: the order of admission.
        now: its time on the core's clock, s.
    """
    message = admin.SchedulerTables(policy=policy)
    for each in tables.block_maps:
        _fill_map(message.block_maps.add(), each, numbers)
    for queue in tables.queues:
        shown = message.queues.add(reason=queue.reason, length=queue.length)
        shown.first.extend(_queued(request, numbers, now) for request in queue.first)
    message.sessions.extend(_session(session, tier, now) for session, tier in tables.sessions)
    return message


def _fill_map(message: admin.BlockMap, found: BlockMap, numbers: RequestNumbers) -> None:
    message.worker_id, message.block_size = found.worker_id, found.block_size
    message.owners.extend(_number(key, numbers) for key in found.owners)
    message.tokens.extend(found.tokens)
    for blocks, into in ((found.device, message.device), (found.host, message.host)):
        _fill_blocks(into, blocks)


def _fill_blocks(message: admin.Blocks, blocks: Blocks) -> None:
    message.total, message.stride = blocks.total, blocks.stride
    message.lengths.extend(blocks.lengths.tolist())
    message.states.extend(blocks.states.tolist())


def _queued(request: Queued, numbers: RequestNumbers, now: float) -> admin.QueuedRequest:
    return admin.QueuedRequest(
        number=_number(request.key, numbers),
        request_id=request.request_id,
        tenant=request.tenant,
        request_class=request.request_class,
        priority=request.priority,
        tokens=request.num_tokens,
        waited_seconds=max(0.0, now - request.since),
        waits_for=request.waits_for.value,
    )


def _session(session: ShownSession, tier: str, now: float) -> admin.Session:
    is_pausing = session.state == "pausing"
    return admin.Session(
        number=session.number,
        tenant=session.tenant,
        session_id=session.name,
        state=session.state,
        turn=session.turn,
        tokens=session.num_tokens,
        tier=tier if is_pausing else "",
        since_seconds=max(0.0, now - session.since),
        expected_seconds=session.since + session.pause_s - now if is_pausing and session.pause_s else 0.0,
    )


def _number(key: RequestKey, numbers: RequestNumbers) -> int:
    return numbers.of(key.frontend, key.stream)
