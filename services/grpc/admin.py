"""`quire.admin.v1.AdminService`: forwards operator requests to the core."""

import time

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from services.errors import RETRY_MS
from services.grpc.boundary import Context
from services.link.core_link import CoreLink
from shared.errors import (
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    RequestNotFoundError,
    WorkerNotFoundError,
)

_TIMEOUT_S = 5.0
_DEFAULT_LIST_LIMIT = 1000
"""Default limit of ListRequests."""
_LEVELS = {
    admin_pb2.LOG_LEVEL_DEBUG: "debug",
    admin_pb2.LOG_LEVEL_INFO: "info",
    admin_pb2.LOG_LEVEL_WARNING: "warning",
    admin_pb2.LOG_LEVEL_ERROR: "error",
}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Operator service; the core answers every request."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        """List the usable workers."""
        reply = await self._ask(link_pb2.OperatorRequest(list_workers=link_pb2.ListWorkers()))
        return admin_pb2.ListWorkersResponse(workers=map(_worker, reply.workers))

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: Context
    ) -> admin_pb2.DrainWorkerResponse:
        """Drain a worker."""
        drain = link_pb2.DrainWorker(worker_id=request.worker_id, move_requests=request.move_requests)
        worker = await self._ask_of_worker(link_pb2.OperatorRequest(drain_worker=drain))
        return admin_pb2.DrainWorkerResponse(worker=worker)

    async def ResumeWorker(
        self, request: admin_pb2.ResumeWorkerRequest, context: Context
    ) -> admin_pb2.ResumeWorkerResponse:
        """Let a drained worker accept requests again."""
        resume = link_pb2.ResumeWorker(worker_id=request.worker_id)
        worker = await self._ask_of_worker(link_pb2.OperatorRequest(resume_worker=resume))
        return admin_pb2.ResumeWorkerResponse(worker=worker)

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        """List live requests."""
        question = link_pb2.ListRequests(most=request.limit or _DEFAULT_LIST_LIMIT)
        reply = await self._ask(link_pb2.OperatorRequest(list_requests=question))
        return admin_pb2.ListRequestsResponse(requests=map(_live_request, reply.requests))

    async def CancelRequest(
        self, request: admin_pb2.CancelRequestRequest, context: Context
    ) -> admin_pb2.CancelRequestResponse:
        """Cancel the requests with an id."""
        cancel = link_pb2.CancelById(request_id=request.request_id)
        reply = await self._ask(link_pb2.OperatorRequest(cancel_by_id=cancel))
        if reply.not_found:
            raise RequestNotFoundError("request_id: no live request has this id; ListRequests returns the live ones")
        return admin_pb2.CancelRequestResponse(cancelled=reply.cancelled)

    async def GetStory(self, request: admin_pb2.GetStoryRequest, context: Context) -> admin_pb2.GetStoryResponse:
        """Return the events of the requests with an id."""
        question = link_pb2.GetStory(request_id=request.request_id)
        reply = await self._ask(link_pb2.OperatorRequest(get_story=question))
        if reply.not_found:
            raise RequestNotFoundError("request_id: no live or recent request has this id")
        now = time.time_ns()
        return admin_pb2.GetStoryResponse(
            stories=[
                admin_pb2.Story(
                    live=story.live,
                    events=[
                        admin_pb2.StoryEvent(time=_timestamp(now - event.ago_ns), what=event.what)
                        for event in story.events
                    ],
                )
                for story in reply.stories
            ]
        )

    async def GetSchedulerState(
        self, request: admin_pb2.GetSchedulerStateRequest, context: Context
    ) -> admin_pb2.GetSchedulerStateResponse:
        """Return the numbers of running and waiting requests, front ends and workers."""
        reply = await self._ask(link_pb2.OperatorRequest(get_state=link_pb2.GetState()))
        return admin_pb2.GetSchedulerStateResponse(
            running_requests=reply.state.running,
            waiting_requests=reply.state.waiting,
            frontends=reply.state.frontends,
            ended_requests=reply.state.ended,
            workers=map(_worker, reply.workers),
        )

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        """Change the log level of all processes."""
        name = _LEVELS.get(request.level)
        if name is None:
            raise InvalidRequestError(
                FieldViolation("level", "unknown level; give one of LOG_LEVEL_DEBUG, _INFO, _WARNING, _ERROR")
            )
        reply = await self._ask(link_pb2.OperatorRequest(set_log_level=link_pb2.SetLogLevel(level=name)))
        names = {each: level for level, each in _LEVELS.items()}
        previous = names.get(reply.log_level, admin_pb2.LOG_LEVEL_UNSPECIFIED)
        return admin_pb2.SetLogLevelResponse(previous=previous)

    async def _ask_of_worker(self, request: link_pb2.OperatorRequest) -> admin_pb2.Worker:
        reply = await self._ask(request)
        if reply.not_found:
            raise WorkerNotFoundError("worker_id: no usable worker has this name; ListWorkers returns the usable ones")
        (worker,) = reply.workers
        return _worker(worker)

    async def _ask(self, request: link_pb2.OperatorRequest) -> link_pb2.OperatorReply:
        reply = await self._link.operate(request, _TIMEOUT_S)
        if reply is None:
            raise NotReadyError("scheduler did not answer in time; try again in a moment", retry_ms=RETRY_MS)
        return reply


def _worker(worker: link_pb2.WorkerState) -> admin_pb2.Worker:
    return admin_pb2.Worker(
        worker_id=worker.worker_id,
        draining=worker.draining,
        running_requests=worker.running_requests,
        plans_in_flight=worker.plans_in_flight,
        free_blocks=worker.free_blocks,
        cached_blocks=worker.cached_blocks,
        total_blocks=worker.total_blocks,
        last_step_tokens=worker.last_step_tokens,
        device=worker.device,
        pid=worker.pid,
    )


def _live_request(request: link_pb2.RequestState) -> admin_pb2.LiveRequest:
    age = Duration()
    age.FromNanoseconds(request.age_ns)
    return admin_pb2.LiveRequest(
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


def _timestamp(nanoseconds: int) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(nanoseconds)
    return timestamp
