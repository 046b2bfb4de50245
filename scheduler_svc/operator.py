"""Operator requests: their events for the core, and the replies. Long lists are cut to fit into a frame."""

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.lifecycle.statistics import RequestStats, SchedulerStats, WorkerStats
from scheduler_svc.core.requests.history import Story
from scheduler_svc.core.scheduler import Scheduler
from shared.packing import fitting

MAX_LISTED = 10_000


def to_events(request: link_pb2.OperatorRequest, core: Scheduler) -> list[ev.Event]:
    """Return the events of a request; none for a request that only reads state."""
    match request.WhichOneof("action"):
        case "drain_worker":
            drain = request.drain_worker
            return [ev.DrainRequested(worker_id=drain.worker_id, move=drain.move_requests)]
        case "resume_worker":
            return [ev.ResumeRequested(worker_id=request.resume_worker.worker_id)]
        case "cancel_requests":
            identities = tuple(request.cancel_requests.identities)
            return [ev.RequestsDropped(identities=identities)] if any(map(core.knows, identities)) else []
        case "cancel_by_id":
            return core.cancelling(request.cancel_by_id.request_id)
    return []


def to_reply(request: link_pb2.OperatorRequest, core: Scheduler, now: float, *, done: int) -> link_pb2.OperatorReply:
    """Return the reply to a request, after its events; `done` is the number of these events."""
    reply = link_pb2.OperatorReply(number=request.number)
    match request.WhichOneof("action"):
        case "list_workers":
            reply.workers.extend(map(_worker_state, core.stats().workers))
        case "drain_worker":
            _add_worker(request.drain_worker.worker_id, core.stats(), reply)
        case "resume_worker":
            _add_worker(request.resume_worker.worker_id, core.stats(), reply)
        case "list_requests":
            found = core.requests(min(request.list_requests.most, MAX_LISTED))
            reply.requests.extend(fitting(_request_state(each, now) for each in found))
        case "cancel_requests" | "cancel_by_id":
            reply.cancelled, reply.not_found = done, not done
        case "get_story":
            stories = core.stories(request.get_story.request_id)
            reply.stories.extend(fitting(_story(each, now) for each in stories))
            reply.not_found = not stories
        case "get_state":
            stats = core.stats()
            reply.workers.extend(map(_worker_state, stats.workers))
            state = reply.state
            state.running, state.waiting, state.frontends = stats.running, stats.waiting, stats.frontends
            for reason, count in stats.ended.items():
                state.ended[reason.value] = count
    return reply


def _add_worker(worker_id: str, stats: SchedulerStats, reply: link_pb2.OperatorReply) -> None:
    """Add the state of a worker to the reply, or set `not_found`."""
    reply.workers.extend(_worker_state(worker) for worker in stats.workers if worker.worker_id == worker_id)
    reply.not_found = not reply.workers


def _request_state(request: RequestStats, now: float) -> link_pb2.RequestState:
    return link_pb2.RequestState(
        request_id=request.request_id,
        state=request.state.name.lower(),
        worker_id=request.worker_id,
        tenant=request.tenant,
        request_class=request.request_class,
        priority=request.priority,
        prompt_tokens=request.prompt_tokens,
        generated_tokens=request.generated_tokens,
        max_tokens=request.max_tokens,
        preemptions=request.preemptions,
        age_ns=_ago(request.arrival, now),
    )


def _story(story: Story, now: float) -> link_pb2.RequestStory:
    events = [link_pb2.StoryEvent(ago_ns=_ago(moment, now), what=what) for moment, what in story.events]
    return link_pb2.RequestStory(live=story.live, events=events)


def _ago(moment: float, now: float) -> int:
    return int(max(now - moment, 0.0) * 1e9)


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
        device=worker.device,
        pid=worker.pid,
    )
