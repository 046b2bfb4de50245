"""`quire.admin.v1.AdminService`: passes an operator's request to the core and the core's answer back."""

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from services.boundary import Context
from services.core_link import CoreLink
from services.errors import RETRY_MS
from shared.errors import NotReadyError, WorkerNotFoundError

_TIMEOUT_S = 5.0


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Knows nothing itself; every answer is the core's."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Context
    ) -> admin_pb2.ListWorkersResponse:
        """Lists the usable workers."""
        workers = await self._ask(link_pb2.OperatorRequest(list_workers=link_pb2.ListWorkers()))
        return admin_pb2.ListWorkersResponse(workers=workers)

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: Context
    ) -> admin_pb2.DrainWorkerResponse:
        """Makes a worker idle."""
        drain = link_pb2.DrainWorker(worker_id=request.worker_id, move_requests=request.move_requests)
        (worker,) = await self._ask(link_pb2.OperatorRequest(drain_worker=drain))
        return admin_pb2.DrainWorkerResponse(worker=worker)

    async def ResumeWorker(
        self, request: admin_pb2.ResumeWorkerRequest, context: Context
    ) -> admin_pb2.ResumeWorkerResponse:
        """Lets a drained worker take requests again."""
        resume = link_pb2.ResumeWorker(worker_id=request.worker_id)
        (worker,) = await self._ask(link_pb2.OperatorRequest(resume_worker=resume))
        return admin_pb2.ResumeWorkerResponse(worker=worker)

    async def _ask(self, request: link_pb2.OperatorRequest) -> list[admin_pb2.Worker]:
        reply = await self._link.operate(request, _TIMEOUT_S)
        if reply is None:
            raise NotReadyError("the scheduler does not answer; try again in a moment", retry_ms=RETRY_MS)
        if reply.not_found:
            raise WorkerNotFoundError("no usable worker has this name; list the workers for those there are")
        return [
            admin_pb2.Worker(
                worker_id=worker.worker_id,
                draining=worker.draining,
                running_requests=worker.running_requests,
                plans_in_flight=worker.plans_in_flight,
                free_blocks=worker.free_blocks,
                cached_blocks=worker.cached_blocks,
                total_blocks=worker.total_blocks,
                last_step_tokens=worker.last_step_tokens,
            )
            for worker in reply.workers
        ]
