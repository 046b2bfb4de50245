"""What operators may ask of the core, and what they are told."""

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core import events as ev
from scheduler_svc.core.stats import SchedulerStats, WorkerStats


def to_event(
    request: link_pb2.OperatorRequest,
) -> ev.DrainRequested | ev.ResumeRequested | ev.RequestsDropped | None:
    """What the request asks the core to do; None for one that only looks."""
    match request.WhichOneof("action"):
        case "drain_worker":
            return ev.DrainRequested(worker_id=request.drain_worker.worker_id, move=request.drain_worker.move_requests)
        case "resume_worker":
            return ev.ResumeRequested(worker_id=request.resume_worker.worker_id)
        case "cancel_requests":
            return ev.RequestsDropped(identities=tuple(request.cancel_requests.identities))
    return None


def to_reply(request: link_pb2.OperatorRequest, stats: SchedulerStats) -> link_pb2.OperatorReply:
    """The state that the request asked for or led to."""
    event = to_event(request)
    if isinstance(event, ev.RequestsDropped):
        return link_pb2.OperatorReply(number=request.number)
    workers = [worker for worker in stats.workers if event is None or worker.worker_id == event.worker_id]
    return link_pb2.OperatorReply(
        number=request.number,
        not_found=event is not None and not workers,
        workers=[_worker_state(worker) for worker in workers],
    )


def _worker_state(worker: WorkerStats) -> link_pb2.WorkerState:
    return link_pb2.WorkerState(
        worker_id=worker.worker_id,
        draining=worker.draining,
        running_requests=worker.rows_running,
        plans_in_flight=worker.plans_in_flight,
        free_blocks=worker.blocks_free,
        cached_blocks=worker.blocks_cached,
        total_blocks=worker.blocks_total,
        last_step_tokens=worker.last_step_tokens,
    )
