"""All live requests, from arrival to end: who they are, who waits and who runs.

A request is in exactly one of three places: *waiting* (in the queue, or *starved* beside it while its reader has no
credit), *running* in a row of a worker, or *ending* (its last step is planned, the answer outstanding). Every request
ends in `end`, exactly once.
"""

from collections.abc import Iterator
from itertools import islice

from scheduler_svc.core import events as ev
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.effects import AttemptEnded, Effect, EndReason, RequestEnded
from scheduler_svc.core.fleet import Fleet
from scheduler_svc.core.forecast import Forecast
from scheduler_svc.core.history import History, Story
from scheduler_svc.core.identified import IdentifiedRequests
from scheduler_svc.core.intake import Intake, TurnedAway
from scheduler_svc.core.request import Request, RequestKey, RequestState, to_request
from scheduler_svc.core.stats import RequestStats, request_stats
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.core.timeouts import Timeouts
from scheduler_svc.core.waiting import make_queue
from scheduler_svc.core.worker import Worker

_NATURAL_ENDS = (EndReason.STOP, EndReason.STOP_STRING, EndReason.LENGTH)
_UNFINISHED = (
    EndReason.CANCELLED,
    EndReason.DEADLINE,
    EndReason.NO_WORKER,
    EndReason.STALLED,
    EndReason.SHUTDOWN,
)
"""Ends after which a request may go on when its client comes back."""
_DUPLICATE = TurnedAway(EndReason.DUPLICATE, "a request with this id is live, or kept for its client to come back")


class RequestRegistry:
    """The live requests of one core; what is to be done goes to `effects`."""

    def __init__(self, config: CoreConfig, fleet: Fleet, effects: list[Effect]) -> None:
        self.waiting = make_queue(config.policy, config.tenant_weights, config.classes)
        self._orders_by_length = "sjf" in {config.policy, *(each.policy for each in config.classes.values())}
        self.forecast = Forecast()
        self.tenants = Tenants(config.tenant_limits)
        self.history = History()
        self.ended: dict[EndReason, int] = dict.fromkeys(EndReason, 0)
        """How many requests have ended for each reason."""
        self._config = config
        self._fleet = fleet
        self._effects = effects
        self._requests: dict[RequestKey, Request] = {}
        self._running: dict[RequestKey, tuple[Worker, int]] = {}
        self.identified = IdentifiedRequests(config.resume_keep_s, config.resume_keep_bytes, effects)
        self._queued_tokens = 0
        self._starved: dict[RequestKey, Request] = {}
        """Waiting requests whose readers have no credit."""
        self._sequence = 0
        self._intake = Intake(config, self.tenants, self.forecast)
        self._timeouts = Timeouts(config, fleet, self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """All live requests; they may end meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, frontend: ev.Peer, stream: int) -> Request | None:
        """The live request of a stream."""
        return self._requests.get(RequestKey(frontend, stream))

    def find(self, request_id: str) -> list[Request]:
        """The live requests of this id: several choices share one, and so may several principals."""
        return [request for request in self._requests.values() if request.request_id == request_id]

    def stories(self, request_id: str) -> list[Story]:
        """What happened to the requests of this id, those that ended lately included."""
        live = [Story(request_id, True, list(request.story)) for request in self.find(request_id)]
        return self.history.stories(request_id) + live

    def stats(self, most: int) -> list[RequestStats]:
        """Figures of live requests, in order of arrival."""
        return [request_stats(request, self._running.get(key)) for key, request in islice(self._requests.items(), most)]

    @property
    def num_waiting(self) -> int:
        """Requests that no worker has taken, starved ones included."""
        return len(self.waiting) + len(self._starved)

    # ---------------------------------------------------------------- life

    def arrive(self, event: ev.RequestArrived, now: float) -> None:
        """A request begins to wait, or is refused."""
        key = RequestKey(event.frontend, event.stream)
        if key in self._requests:
            return  # submitted twice by a front end in doubt; the first one stands
        is_duplicate = False
        if event.identity:
            live = self.identified.live(event.identity)
            is_duplicate = not event.again and self.identified.knows(event.identity)
            if live is not None and event.again:
                self.end(live, EndReason.CANCELLED, now, message="another call goes on with the request")
        self._sequence += 1
        request = to_request(event, self._sequence, now)
        self._requests[key] = request
        request.note(now, "arrived")
        if event.identity and not is_duplicate:
            self.identified.began(request, event)
        turned_away = (
            _DUPLICATE if is_duplicate else self._intake.turns_away(request, self.num_waiting, self._queued_tokens, now)
        )
        self.tenants.arrived(request, now)
        if turned_away is not None:
            reason, message, retry_ms = turned_away
            self.end(request, reason, now, message=message, retry_ms=retry_ms)
        else:
            self._timeouts.watch_deadline(request)
            self.requeue(request, now)

    def grant(self, request: Request, credit: int, now: float) -> None:
        """The request's reader has room for `credit` more bytes."""
        request.grant(credit)
        running = self._running.get(request.key)
        if running is not None:
            worker, row = running
            worker.rows.set_allowed(row, request.allowed)
        elif request.key in self._starved:
            del self._starved[request.key]
            self.requeue(request, now)

    def admitted(self, request: Request, worker: Worker, row: int, now: float) -> None:
        """A worker has taken a request out of the queue."""
        self._queued_tokens -= request.queued_tokens
        request.queued_tokens = 0
        self._drop_swapped(request)
        if request.state is RequestState.RUNNING:
            self._running[request.key] = (worker, row)
        if request.attempts == 1:
            self._intake.admitted(request, now)

    def last_step_planned(self, request: Request) -> None:
        """The request has left its row and waits for its last answer."""
        self._running.pop(request.key, None)  # absent when the plan that admitted it is its last, too

    def requeue(self, request: Request, now: float) -> None:
        """Puts a request among the waiting, from wherever it was."""
        self._running.pop(request.key, None)
        if request.state is not RequestState.WAITING:
            self.tenants.paused(request, now)
        request.state = RequestState.WAITING
        self._queued_tokens += len(request.tokens) - request.queued_tokens
        request.queued_tokens = len(request.tokens)
        request.queued_since = now
        request.overtaken = request.passed_over = request.left_elsewhere = 0
        if self._orders_by_length:
            request.forecast_tokens = self.forecast.output_tokens(request)
        if request.total_deadline is not None or request.ttft_deadline is not None:
            request.latest_start = self.forecast.latest_start(request)
            request.must_start = self.forecast.must_start(request)
        if request.allowed > len(request.tokens):
            self.waiting.push(request)
        else:
            self._starved[request.key] = request
            self._timeouts.watch_reader(request, now)

    def displace(self, request: Request, outcome: str, note: str, now: float) -> None:
        """A request left its worker and is not over."""
        request.preemptions += 1
        request.note(now, note)
        self._attempt_ended(request, outcome)
        self.requeue(request, now)

    def end(
        self,
        request: Request,
        reason: EndReason,
        now: float,
        *,
        message: str = "",
        retry_ms: int = 0,
        completion_tokens: int | None = None,
        stop_token_id: int = 0,
        keep: bool = True,
        embedding: bytes = b"",
    ) -> None:
        """The one exit: whatever state a request is in, it leaves here, once.

        `keep`: a log is left of a request with an identity.
        """
        assert self._requests.pop(request.key) is request
        was = request.state
        request.state = RequestState.FINISHED
        self._drop_swapped(request)
        self._leave(request, was, reason)
        num_generated = request.num_generated
        if self.waiting.accounts_service and num_generated > request.accounted_tokens:
            self.waiting.served(request.account, output_tokens=num_generated - request.accounted_tokens)
        self._queued_tokens -= request.queued_tokens
        self.tenants.ended(request, now, was_running=was is not RequestState.WAITING)
        self.ended[reason] += 1
        kept = num_generated if completion_tokens is None else completion_tokens
        what = f"ended: {reason.value}, {kept} tokens"
        request.note(now, f"{what} ({message})" if message else what)
        self.history.keep(request)
        if reason in _NATURAL_ENDS:
            self.forecast.request_finished(request)
        ended = RequestEnded(
            frontend=request.key.frontend,
            stream=request.key.stream,
            request_id=request.request_id,
            reason=reason,
            message=message,
            retry_ms=retry_ms,
            completion_tokens=kept,
            stop_token_id=stop_token_id,
            cached_prompt_tokens=request.num_cached_prompt_tokens,
            preemptions=request.preemptions,
            queued_s=(request.first_planned or now) - request.arrival,
            embedding=embedding,
        )
        if request.origin is not None:
            is_natural = reason in _NATURAL_ENDS
            self.identified.ended(
                request, ended if is_natural else None, keep=keep and (is_natural or reason in _UNFINISHED), now=now
            )
        self._effects.append(ended)

    def _leave(self, request: Request, was: RequestState, reason: EndReason) -> None:
        """Takes a request that ends from where it was."""
        running = self._running.pop(request.key, None)
        if running is not None:
            worker, row = running
            worker.vacate(row)
            self._attempt_ended(request, reason.value)
        elif request.key in self._starved:
            del self._starved[request.key]
        elif request.queued:
            self.waiting.discard(request)
        elif was is RequestState.ENDING:
            self._attempt_ended(request, reason.value)

    def resume(self, event: ev.ResumeAsked, now: float) -> None:
        """Hands out what is kept of a request, which is over for whoever had it."""
        live = self.identified.live(event.identity)
        if live is not None:
            self.end(live, EndReason.CANCELLED, now, message="another call goes on with the request")
        self.identified.answer(event)

    def drop(self, identities: tuple[bytes, ...], now: float) -> None:
        """Ends requests for good."""
        for identity in identities:
            live = self.identified.live(identity)
            if live is not None:
                self.end(live, EndReason.CANCELLED, now, message="the request was cancelled", keep=False)
            self.identified.drop(identity)

    def _drop_swapped(self, request: Request) -> None:
        """Frees the host memory of a request that is over or goes on elsewhere."""
        if request.swapped is not None:
            for worker in self._fleet:
                worker.release_swapped(request, last_step=worker.last_step)
            request.swapped = None

    def _attempt_ended(self, request: Request, outcome: str) -> None:
        if request.traceparent:
            self._effects.append(
                AttemptEnded(frontend=request.key.frontend, stream=request.key.stream, outcome=outcome)
            )

    # ---------------------------------------------------------------- time

    def time_passed(self, now: float) -> None:
        """Ends whoever's time is up."""
        self.identified.time_passed(now)
        for request, reason, message in self._timeouts.overdue(self.waiting, now):
            self.end(request, reason, now, message=message)

    def validate(self) -> None:
        """Checks that every request is in exactly one place."""
        for worker in self._fleet:
            for row in worker.rows.occupied():
                request = worker.rows.requests[row]
                assert request is not None
                assert self._running[request.key] == (worker, row)
        queued = self.waiting.requests() + list(self._starved.values())
        assert len({request.key for request in queued}) == len(queued), "a request waits twice"
        ending = [r.key for r in self._requests.values() if r.state is RequestState.ENDING]
        live = [request.key for request in queued] + list(self._running) + ending
        assert sorted(live) == sorted(self._requests), "a request is nowhere or in two places"
        assert all(request.state is RequestState.WAITING for request in queued)
        for worker in self._fleet:
            worker.swap.pool.validate(
                r.swapped.host_blocks for r in queued if r.swapped is not None and r.swapped.epoch == worker.epoch
            )
        assert self._queued_tokens == sum(request.queued_tokens for request in queued)
