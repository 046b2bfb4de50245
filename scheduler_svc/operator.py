"""Operator API: handles `quire.admin.v1` calls, which front ends forward without decoding."""

import time
from collections.abc import Callable, Mapping

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from protos.quire.link.v1 import link_pb2
from quire import __version__
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.lifecycle.statistics import RequestStats, WorkerStats
from scheduler_svc.core.requests.history import Story
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.frontend.link import error_reply
from shared.errors import (
    FieldViolation,
    InvalidRequestError,
    QuireError,
    RequestNotFoundError,
    UnsupportedMethodError,
    WorkerNotFoundError,
)
from shared.logging import get_logger
from shared.packing import fitting

MAX_LISTED = 10_000
_DEFAULT_LIST_LIMIT = 1000
_REQUESTS: dict[str, type[Message]] = {
    method.input_type.full_name: GetMessageClass(method.input_type)
    for method in admin.DESCRIPTOR.services_by_name["AdminService"].methods
}
"""The requests of the operator API by their full names."""
_LEVELS: dict[admin.LogLevel.ValueType, str] = {
    admin.LOG_LEVEL_DEBUG: "debug",
    admin.LOG_LEVEL_INFO: "info",
    admin.LOG_LEVEL_WARNING: "warning",
    admin.LOG_LEVEL_ERROR: "error",
}

log = get_logger()


class Operator:
    """Answers operator requests from the core's state. It changes the core only through events."""

    def __init__(
        self,
        core: Scheduler,
        *,
        apply: Callable[[ev.Event, float], None],
        set_log_level: Callable[[str], str],
        settings: Mapping[str, str],
    ) -> None:
        """Create the API of a core.

        Args:
            core: the scheduler core, which is only read here.
            apply: passes an event to the core at a time, and carries out the effects.
            set_log_level: sets the level of all processes, and returns the previous one.
            settings: the core's settings as text, for operators.
        """
        self._core = core
        self._apply = apply
        self._set_log_level = set_log_level
        self._settings = settings

    def reply(self, request: link_pb2.OperatorRequest, now: float) -> link_pb2.OperatorReply:
        """Execute a request and return its reply."""
        reply = link_pb2.OperatorReply(number=request.number)
        try:
            if request.HasField("cancel_requests"):
                self._drop(tuple(request.cancel_requests.identities), now)
            else:
                reply.response.Pack(self._answer(_unpacked(request.call), now))
        except QuireError as error:
            return error_reply(request.number, error)
        return reply

    def _answer(self, request: Message, now: float) -> Message:
        match request:
            case admin.ListWorkersRequest():
                return admin.ListWorkersResponse(workers=map(to_worker, self._core.stats().workers))
            case admin.DrainWorkerRequest():
                self._order(ev.DrainRequested(worker_id=request.worker_id, move=request.move_requests), now)
                return admin.DrainWorkerResponse(worker=self._worker_named(request.worker_id))
            case admin.ResumeWorkerRequest():
                self._order(ev.ResumeRequested(worker_id=request.worker_id), now)
                return admin.ResumeWorkerResponse(worker=self._worker_named(request.worker_id))
            case admin.ListRequestsRequest():
                found = self._core.requests(min(request.limit or _DEFAULT_LIST_LIMIT, MAX_LISTED))
                return admin.ListRequestsResponse(requests=fitting(_live_request(each, now) for each in found))
            case admin.CancelRequestRequest():
                return self._cancel(request.request_id, now)
            case admin.GetStoryRequest():
                stories = self._core.stories(request.request_id)
                if not stories:
                    raise RequestNotFoundError("request_id: no live or recent request has this id")
                return admin.GetStoryResponse(stories=fitting(_story(each, now) for each in stories))
            case admin.GetSchedulerStateRequest():
                return self._state()
            case admin.SetLogLevelRequest():
                return self._change_log_level(request.level)
        raise UnsupportedMethodError("operator call: unknown to this version of the scheduler; upgrade the scheduler")

    def _order(self, event: ev.Event, now: float) -> None:
        log.info("operator", order=str(event))
        self._apply(event, now)

    def _worker_named(self, worker_id: str) -> admin.Worker:
        for worker in self._core.stats().workers:
            if worker.worker_id == worker_id:
                return to_worker(worker)
        raise WorkerNotFoundError(
            "worker_id: no usable worker has this name; use ListWorkers or quire workers to list the workers"
        )

    def _cancel(self, request_id: str, now: float) -> admin.CancelRequestResponse:
        events = self._core.cancelling(request_id)
        if not events:
            raise RequestNotFoundError(
                "request_id: no live request has this id; use ListRequests to list the live requests"
            )
        for event in events:
            self._order(event, now)
        return admin.CancelRequestResponse(cancelled=len(events))

    def _drop(self, identities: tuple[bytes, ...], now: float) -> None:
        """End resumable requests and drop their logs, as requested by their client."""
        if not any(map(self._core.knows, identities)):
            raise RequestNotFoundError("request_id: no resumable request with this id is running or stored")
        self._apply(ev.RequestsDropped(identities=identities), now)

    def _state(self) -> admin.GetSchedulerStateResponse:
        stats = self._core.stats()
        return admin.GetSchedulerStateResponse(
            running_requests=stats.running,
            waiting_requests=stats.waiting,
            frontends=stats.frontends,
            ended_requests={reason.value: count for reason, count in stats.ended.items()},
            workers=map(to_worker, stats.workers),
            release=__version__,
            settings=self._settings,
        )

    def _change_log_level(self, level: admin.LogLevel.ValueType) -> admin.SetLogLevelResponse:
        name = _LEVELS.get(level)
        if name is None:
            raise InvalidRequestError(
                FieldViolation("level", "unknown level; use one of LOG_LEVEL_DEBUG, _INFO, _WARNING, _ERROR")
            )
        before = self._set_log_level(name)
        return admin.SetLogLevelResponse(previous=next(each for each in _LEVELS if _LEVELS[each] == before))


def _unpacked(call: AnyMessage) -> Message:
    """Return a call's request; an empty message if this version does not know its type."""
    request_type = _REQUESTS.get(call.TypeName(), Empty)
    try:
        return request_type.FromString(call.value)
    except DecodeError:
        raise InvalidRequestError(FieldViolation("request", "not a valid serialized message")) from None


def to_worker(worker: WorkerStats) -> admin.Worker:
    """Convert a worker's statistics to the message for operators."""
    return admin.Worker(
        worker_id=worker.worker_id,
        draining=worker.draining,
        running_requests=worker.rows_running,
        plans_in_flight=worker.plans_in_flight,
        free_blocks=worker.blocks_free,
        cached_blocks=worker.blocks_cached,
        total_blocks=worker.blocks_total,
        last_step_tokens=worker.last_step_tokens,
        device=worker.device,
        pid=worker.pid,
        rows=worker.rows_total,
        host_blocks=worker.host_blocks_total,
        held_host_blocks=worker.host_blocks_held + worker.host_blocks_cached,
        draft_tokens=worker.counters.draft_tokens,
        accepted_draft_tokens=worker.counters.accepted_draft_tokens,
        cache_kinds=worker.cache_kinds,
        block_bytes=worker.block_bytes,
        window_blocks=worker.window_blocks,
        state_bytes=worker.state_bytes,
        checkpoints=admin.Checkpoints(**worker.checkpoints._asdict()) if worker.checkpoints.total else None,
    )


def _live_request(request: RequestStats, now: float) -> admin.LiveRequest:
    age = Duration()
    age.FromNanoseconds(_ago(request.arrival, now))
    return admin.LiveRequest(
        request_id=request.request_id,
        state=request.state,
        worker_id=request.worker_id,
        tenant=request.tenant,
        request_class=request.request_class,
        priority=request.priority,
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.generated_tokens,
        max_tokens=request.max_tokens,
        preemptions=request.preemptions,
        age=age,
    )


def _story(story: Story, now: float) -> admin.Story:
    message, wall_ns = admin.Story(live=story.live), time.time_ns()
    for moment, what in story.events:
        message.events.add(what=what).time.FromNanoseconds(wall_ns - _ago(moment, now))
    return message


def _ago(moment: float, now: float) -> int:
    """Return how long ago a time was, in nanoseconds."""
    return int(max(now - moment, 0.0) * 1e9)
