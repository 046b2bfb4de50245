"""Live views: what the recorder notes of the steps, streamed to operators who watch.

The recorder's thread makes the parts; the loop passes them on at its ticks, with the present load. A front end that
does not keep up gets no part: the steps in it are counted, and the next part says how many were dropped. While nobody
watches, no part is made.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.lifecycle.statistics import SchedulerStats
from scheduler_svc.frontend_hub import FrontendHub
from scheduler_svc.frontend_link import error_reply
from scheduler_svc.operator import to_worker
from scheduler_svc.recorder.recorder import Recorder
from shared.errors import FieldViolation, InvalidRequestError, OverloadedError, QuireError, UnsupportedMethodError

MAX_VIEWS = 8


@dataclass(slots=True)
class _View:
    dropped: int = 0
    """Steps that were dropped since the last part."""


class LiveViews:
    """The views of all front ends."""

    def __init__(
        self, recorder: Recorder | None, frontends: FrontendHub, stats: Callable[[], SchedulerStats], wall_ns: int
    ) -> None:
        """Create without views.

        Args:
            recorder: makes the parts; None: nobody can watch.
            frontends: carries the parts.
            stats: returns the core's figures.
            wall_ns: wall clock at time 0 of the core's clock, ns.
        """
        self._recorder = recorder
        self._frontends = frontends
        self._stats = stats
        self._wall_ns = wall_ns
        self._views: dict[tuple[Peer, int], _View] = {}

    @staticmethod
    def asked(request: link_pb2.OperatorRequest) -> bool:
        """Return whether an operator asks for a view."""
        return request.HasField("call") and request.call.Is(admin.WatchStepsRequest.DESCRIPTOR)

    def ask(self, peer: Peer, request: link_pb2.OperatorRequest) -> link_pb2.OperatorReply:
        """Begin a view; return the reply that it has begun, or why not."""
        try:
            admin.WatchStepsRequest.FromString(request.call.value)
            if self._recorder is None:
                raise UnsupportedMethodError("watch: the scheduler keeps no record; start it with --record-dir")
            if len(self._views) >= MAX_VIEWS:
                raise OverloadedError(f"watch: {MAX_VIEWS} others watch already; end another live view first")
        except DecodeError:
            return error_reply(request.number, InvalidRequestError(FieldViolation("request", "not a valid message")))
        except QuireError as error:
            return error_reply(request.number, error)
        self._views[peer, request.number] = _View()
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
        """Pass on what the recorder has made since the last call."""
        if not self._views or self._recorder is None:
            return
        for part in self._recorder.take_views():
            if part.HasField("load"):
                self._fill(part.load, now)
            steps, data = len(part.steps) + part.dropped_steps, part.SerializeToString()
            for (peer, number), view in self._views.items():
                response = data
                if view.dropped:
                    # Messages that are joined are merged; a number replaces the one before.
                    dropped = part.dropped_steps + view.dropped
                    response += admin.WatchStepsResponse(dropped_steps=dropped).SerializeToString()
                message = link_pb2.View(number=number, response=response, steps=steps + view.dropped)
                view.dropped = 0 if self._frontends.offer(peer, message) else message.steps

    def _stop_if_idle(self) -> None:
        if not self._views and self._recorder is not None:
            self._recorder.watch(False)

    def _fill(self, load: admin.SchedulerLoad, now: float) -> None:
        stats = self._stats()
        load.time.FromNanoseconds(self._wall_ns + round(now * 1e9))
        load.running_requests, load.waiting_requests = stats.running, stats.waiting
        load.waiting_by_reason.update(stats.waiting_by_reason)
        load.workers.extend(map(to_worker, stats.workers))
