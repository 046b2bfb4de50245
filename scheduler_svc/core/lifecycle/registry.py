"""Registry of all live requests, from arrival to end.

The registry accepts or refuses requests, and decides which state event applies to each. `states` contains the table of
transitions and the requests by state. Every request ends exactly once, in `end`. The registry does not choose which
request runs next; `batch_selection` does.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect, EndReason, RequestEnded
from scheduler_svc.core.interface.plan import RowAdmission
from scheduler_svc.core.interface.records import GrammarFailure, NoteKind, Notes
from scheduler_svc.core.lifecycle.admission_control import AdmissionControl, TurnedAway
from scheduler_svc.core.lifecycle.states import WAITING, RequestEvent, RequestStates
from scheduler_svc.core.lifecycle.statistics import RequestStats, SessionStats, request_stats
from scheduler_svc.core.lifecycle.timeouts import Timeouts
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.forecast import Forecast
from scheduler_svc.core.queueing.policies import make_policy
from scheduler_svc.core.queueing.session_gate import SessionGate
from scheduler_svc.core.queueing.sessions import Sessions, session_name
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.history import History, Story, story_of
from scheduler_svc.core.requests.request import Request, RequestKey, RequestState, Wait, to_request
from scheduler_svc.core.requests.resumable import IdentifiedRequests
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.worker import Worker
from shared.request_names import meant

_NATURAL_ENDS = (EndReason.STOP, EndReason.STOP_STRING, EndReason.LENGTH)
_UNFINISHED = (
    EndReason.CANCELLED,
    EndReason.DEADLINE,
    EndReason.NO_WORKER,
    EndReason.STALLED,
    EndReason.SHUTDOWN,
)
"""End reasons after which a request may continue when its client reconnects."""
_DUPLICATE = TurnedAway(EndReason.DUPLICATE, "request_id: in use by a live or resumable request; choose another")


class RequestRegistry:
    """Owns one core's live requests; appends effects to `effects`."""

    def __init__(self, config: CoreConfig, fleet: Fleet, effects: list[Effect], notes: Notes | None = None) -> None:
        self.policy = make_policy(config.policy, config.tenant_weights, config.classes)
        policies = {config.policy, *(each.policy for each in config.classes.values())}
        self._orders_by_length, self._has_targets = "sjf" in policies, "slo" in policies
        self.forecast = Forecast(fleet, config)
        self.tenants = Tenants(config.tenant_limits)
        self.sessions = Sessions() if config.holds_sessions else None
        gate = None if self.sessions is None else SessionGate(self.sessions, self.policy, config.session_wait_s)
        self.backlog = Backlog(
            self.policy,
            self.tenants,
            gate,
            serves_by_length=config.serves_short_first and not self.policy.is_by_turns,
        )
        self.history = History()
        self.ended: dict[EndReason, int] = dict.fromkeys(EndReason, 0)
        """Number of ended requests per reason."""
        self._config = config
        self._fleet = fleet
        self._effects = effects
        self._notes = notes
        self._requests: dict[RequestKey, Request] = {}
        self._states = RequestStates(self.backlog, self.tenants, effects)
        self.identified = IdentifiedRequests(config.resume_keep_s, config.resume_keep_bytes, effects)
        self._by_grammar: dict[bytes, dict[RequestKey, Request]] = {}
        """The live requests with a grammar, by the grammar's key."""
        self._doubtful_grammars: dict[bytes, None] = {}
        """Grammars of waiting requests that possibly no worker can compile. `time_passed` checks them."""
        self._sequence = 0
        self._admission = AdmissionControl(config, self.tenants, self._predict)
        self._timeouts = Timeouts(config, fleet, self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over a copy of the live requests, so that they may end during the iteration."""
        return iter(list(self._requests.values()))

    def get(self, frontend: ev.Peer, stream: int) -> Request | None:
        """Return the live request of a stream, or None."""
        return self._requests.get(RequestKey(frontend, stream))

    def row_of(self, request: Request) -> int | None:
        """Return the row of a running request, or None."""
        running = self._states.row_of(request.key)
        return None if running is None else running[1]

    def find(self, request_id: str) -> list[Request]:
        """Return the live requests with this id, as defined by `meant`.

        Several choices share one id, and several principals may use the same id.
        """
        ids = meant(request_id, (request.spec.request_id for request in self._requests.values()))
        return [request for request in self._requests.values() if request.spec.request_id in ids]

    def story(self, frontend: ev.Peer, stream: int) -> Story | None:
        """Return the history of a stream's request, live or ended recently."""
        key = RequestKey(frontend, stream)
        request = self._requests.get(key)
        return self.history.get(key) if request is None else story_of(request)

    def stories(self, request_id: str) -> list[Story]:
        """Return the histories of the live and recently ended requests with this id, as defined by `meant`."""
        known = [*self.history, *map(story_of, self._requests.values())]
        ids = meant(request_id, (story.request_id for story in known))
        return [story for story in known if story.request_id in ids]

    def stats(self, most: int) -> list[RequestStats]:
        """Return the metrics of at most `most` live requests, in order of arrival."""
        return [
            request_stats(request, self._states.row_of(key)) for key, request in islice(self._requests.items(), most)
        ]

    @property
    def num_waiting(self) -> int:
        """Number of requests without a worker, including starved and stranded ones."""
        return self._states.num_waiting

    @property
    def queued_tokens(self) -> int:
        """Number of tokens of the waiting requests."""
        return self._states.queued_tokens

    @property
    def waiting_by_reason(self) -> dict[str, int]:
        """Number of waiting requests by waiting reason."""
        return self._states.waiting_by_reason

    @property
    def session_stats(self) -> SessionStats:
        """The sessions in numbers."""
        sessions, gate = self.sessions, self.backlog.gate
        if sessions is None or gate is None:
            return SessionStats()
        return SessionStats(
            active=sessions.num_active,
            pausing=sessions.num_pausing,
            later_turns=sessions.num_later_turns,
            lost_tokens=sessions.num_lost_tokens,
            pauses=replace(sessions.pauses),
            gate=replace(gate.counters),
        )

    @property
    def models(self) -> set[str]:
        """Model fingerprints required by live requests; "" for requests that require no particular model."""
        return {request.spec.model for request in self._requests.values()}

    # ---------------------------------------------------------------- life

    def arrive(self, event: ev.RequestArrived, now: float) -> Request | None:
        """Queue a new request, or refuse it; return it if it was queued."""
        key = RequestKey(event.frontend, event.stream)
        if key in self._requests:
            return None  # The front end got no response and submitted the request again. Keep the first submission.
        is_duplicate = False
        identity = event.spec.identity
        if identity:
            live = self.identified.live(identity)
            is_duplicate = not event.again and self.identified.knows(identity)
            if live is not None and event.again:
                self.end(
                    live,
                    EndReason.CANCELLED,
                    now,
                    message="request cancelled: another call continues it; read the rest of the answer there",
                )
        self._sequence += 1
        request = to_request(event, self._sequence, now, self._notes)
        if self._has_targets and self._config.policy_of(request.spec.request_class) == "slo":
            request.ttft_deadline = request.first_token_due(self._config.slo_ttft_s, self._config.slo_ttft_token_s)
        self._requests[key] = request
        if request.grammar_key:
            self._by_grammar.setdefault(request.grammar_key, {})[key] = request
        request.note(now, NoteKind.ARRIVED, "arrived")
        turned_away = (
            _DUPLICATE
            if is_duplicate
            else self._admission.refusal(
                request,
                num_waiting=self.num_waiting,
                num_competing=self.backlog.num_startable,
                num_tokens=self._states.queued_tokens,
                now=now,
            )
        )
        if identity and turned_away is None:
            # A refusal does not change the request's retained log, because the client may retry later.
            self.identified.began(request)
        self.tenants.arrived(request, now)
        if turned_away is not None:
            reason, message, retry_ms = turned_away
            self.refuse(request, reason, now, message=message, retry_ms=retry_ms)
        elif len(request.tokens) >= request.limit:
            self.end(request, EndReason.LENGTH, now)  # The resumed request has already generated all of its tokens.
        else:
            self._timeouts.watch_deadline(request)
            if request.prediction is not None:
                request.note(now, NoteKind.FORECAST, request.prediction.line)
            if self.sessions is not None and not (request.under_way or request.spec.pooling):
                turn = self.sessions.arrived(request, now)
                if turn is not None:
                    text = turn.text(len(request.tokens) - request.wait.uncached)
                    request.note(now, NoteKind.SESSION, text)
            self.requeue(request, now)
            return request
        return None

    def _predict(self, request: Request, num_competing: int, now: float) -> None:
        """Forecast times for a new request, which `num_competing` others compete with."""
        worker, uncached = self.forecast.look_up(request, now)
        request.wait.uncached = uncached
        if request.deadline is not None:
            request.wait.must_start = self.forecast.must_start(request, uncached)
        if not request.accepted and not request.num_generated:
            request.prediction = self.forecast.predict(
                request, uncached, worker, num_competing, self.backlog.competing_tokens, now
            )

    def grant(self, request: Request, credit: int, now: float) -> None:
        """Add `credit` bytes to the request's credit."""
        request.grant(credit)
        running = self._states.row_of(request.key)
        if running is not None:
            worker, row = running
            worker.rows.set_allowed(row, request.allowed)
        elif request.state is RequestState.STARVED:
            self.requeue(request, now)

    def admitted(self, request: Request, worker: Worker, admission: RowAdmission, now: float) -> None:
        """Record that a plan has given the request a row."""
        self._states.admit(request, worker, admission, now)
        self.drop_swapped(request)
        if request.attempts == 1:
            self.forecast.admitted(request.prediction, now - request.arrival, self.backlog.num_startable, now)
            if self.sessions is not None:
                self.sessions.started(request)

    def refuse_grammar(self, key: bytes, now: float) -> None:
        """End the waiting requests with this grammar that no worker can serve."""
        for request in list(self._by_grammar.get(key, {}).values()):
            if request.state not in WAITING or (failure := self._grammar_failure(request)) is None:
                continue
            reason, message, field = EndReason.NO_WORKER, f"no worker can use the grammar: {failure.reason}", ""
            if failure.is_invalid:
                reason, message, field = EndReason.INVALID, failure.reason, "grammar"
            self.end(request, reason, now, message=message, field=field)

    def _grammar_failure(self, request: Request) -> GrammarFailure | None:
        """Return the reason why no worker can compile a request's grammar; None while a worker may still compile it."""
        return self._fleet.grammar_failure(request.grammar_key, lambda worker: self.backlog.can_serve(worker, request))

    def doubt_grammars(self) -> None:
        """Queue failed grammars for another check, because a worker that could compile them may have left."""
        failed = (key for worker in self._fleet for key in worker.grammars.failed())
        self._doubtful_grammars |= dict.fromkeys(key for key in failed if key in self._by_grammar)

    def last_step_planned(self, request: Request) -> None:
        """Record that the request has left its row and only waits for its last result."""
        self._states.last_step_planned(request)

    def requeue(self, request: Request, now: float, outcome: str = "") -> None:
        """Make a request wait for a worker; `outcome` is why it left its previous worker."""
        if request.state is RequestState.ARRIVED:
            wait = request.wait
        else:
            wait = Wait(uncached=self.forecast.uncached_tokens(request))
        wait.since = now
        if self._orders_by_length:
            wait.forecast_tokens = self.forecast.output_tokens(request)
        if request.total_deadline is not None or request.ttft_deadline is not None:
            wait.latest_start = self.forecast.latest_start(request, wait.uncached)
            wait.must_start = self.forecast.must_start(request, wait.uncached)
            if request.late_rank is not None and wait.latest_start is not None and wait.latest_start < now:
                wait.latest_start = None  # The request keeps its rank among requests that missed their targets.
            else:
                request.late_rank = None
        if request.grammar_key and self._grammar_failure(request) is not None:
            self._doubtful_grammars[request.grammar_key] = None
        self._states.wait(request, wait, outcome)
        if request.state is RequestState.STARVED:
            self._timeouts.watch_reader(request, now)

    def strand(self, request: Request, now: float) -> None:
        """Move a request that no worker can serve out of the queue until the fleet changes."""
        self._states.strand(request, now)

    def model_changed(self) -> None:
        """Drop the block keys of all requests, because they depend on the model. They are computed again on demand."""
        for request in self._requests.values():
            request.keys.clear()

    def fleet_changed(self, now: float) -> None:
        """Put stranded requests that a worker can now serve into the backlog, which already knows the new fleet."""
        for request in list(self._states.stranded):
            if self.backlog.is_served(request):
                self.requeue(request, now)

    def preempted(self, request: Request, by: Request, worker: Worker, now: float) -> None:
        """Requeue a request that the planner preempted for another request, or because it ranks last.

        The request is not preempted again before it has a new token.
        """
        request.preempted_at = request.num_generated
        kind, remedy = NoteKind.PREEMPTED, "its KV will be computed again"
        if request.swapped is not None:
            kind, remedy = NoteKind.SWAPPED, f"{len(request.swapped.host_blocks)} blocks swapped out"
        whose = f"by {by.spec.request_id}"
        has_credit = request.allowed > len(request.tokens)
        if by is request:
            why = "it is out of memory and ranks last" if has_credit else "its reader takes no output"
            whose = f"because {why}"
        text = f"preempted on {worker.worker_id} {whose}; {remedy}"
        # The request's own key means that the request lacked memory. No key means that no other request took its place.
        request.note(now, kind, text, by=by.key if by is not request or has_credit else None)
        self.requeue(request, now, "preempted")
        request.wait.behind = by if by is not request else None

    def displace(self, request: Request, outcome: str, note: str, now: float) -> None:
        """Requeue a request that has left its worker before its end; `outcome` is a value of `NoteKind`."""
        request.note(now, NoteKind(outcome), note)
        self.requeue(request, now, outcome)

    def refuse(self, request: Request, reason: EndReason, now: float, *, message: str = "", retry_ms: int = 0) -> None:
        """End a request that was not accepted, or that the planner took from the queue and refused."""
        self.end(request, reason, now, message=message, retry_ms=retry_ms, event=RequestEvent.REFUSE)

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
        field: str = "",
        event: RequestEvent = RequestEvent.END,
    ) -> None:
        """End a request in any state. Every request ends through this method.

        Args:
            request: the live request.
            reason: the reason for the end.
            now: the time, s.
            message: the text for the client.
            retry_ms: time after which the client may retry, ms; 0 for never.
            completion_tokens: generated tokens that count; None for all.
            stop_token_id: the stop token that ended the request, if one did.
            keep: whether to keep a log of a request with an identity.
            embedding: the embedding as a float32 column.
            field: the request's wrong field; "" for none or for the input.
            event: the state event that ends it: END or REFUSE.
        """
        assert self._requests.pop(request.key) is request
        self.forecast.workers_change()
        if request.grammar_key:
            with_grammar = self._by_grammar[request.grammar_key]
            del with_grammar[request.key]
            if not with_grammar:
                del self._by_grammar[request.grammar_key]
        self.drop_swapped(request)
        self._states.end(request, event, reason.value, now)
        num_generated = request.num_generated
        self.ended[reason] += 1
        kept = num_generated if completion_tokens is None else completion_tokens
        num_tokens = request.spec.num_prompt_tokens + kept
        if reason in _NATURAL_ENDS and (request.spec.retention_s or request.spec.ends_session):
            self._retain(request, num_tokens, now)
        if self.sessions is not None:
            self.sessions.ended(
                request, num_tokens, now, is_complete=reason in _NATURAL_ENDS, find=partial(self._place, request)
            )
        what = f"ended: {reason.value}, {kept} tokens"
        request.note(now, NoteKind.ENDED, f"{what} ({message})" if message else what)
        self.history.keep(request, reason.value)
        if reason in _NATURAL_ENDS:
            self.forecast.finished(request, request.prediction, now - request.arrival)
        ended = RequestEnded(
            frontend=request.key.frontend,
            stream=request.key.stream,
            request_id=request.spec.request_id,
            reason=reason,
            message=message,
            retry_ms=retry_ms,
            completion_tokens=kept,
            stop_token_id=stop_token_id,
            cached_prompt_tokens=request.num_cached_prompt_tokens,
            preemptions=request.preemptions,
            draft_tokens=request.drafted_tokens,
            accepted_draft_tokens=request.accepted_tokens,
            energy_j=request.energy_j,
            queued_s=(request.first_planned or now) - request.arrival,
            embedding=embedding,
            field=field,
        )
        if request.is_logged:
            is_natural = reason in _NATURAL_ENDS
            self.identified.ended(
                request, ended if is_natural else None, keep=keep and (is_natural or reason in _UNFINISHED), now=now
            )
        self._effects.append(ended)

    def _retain(self, request: Request, num_tokens: int, now: float) -> None:
        """Retain the KV of a request that ends by itself, or end the retention by earlier turns of its session."""
        names = (session_name(request), None if self.sessions is None else self.sessions.number(request))
        # The name first, because it is the same for turns that run concurrently.
        sessions = [each for each in names if each is not None]
        for worker in self._fleet:
            if request.spec.ends_session:
                worker.pool.end_sessions(sessions)
            if request.spec.retention_s:
                until = now + request.spec.retention_s
                worker.prefixes.retain(request, num_tokens, until, sessions[0] if sessions else None)

    def _place(self, request: Request, num_tokens: int) -> tuple[int, int] | None:
        """Return the epoch and the cached device block that ends after `num_tokens` of the request's tokens, or None.

        Only the worker that ran the request is searched, because this is called for each request.
        """
        worker = self._fleet.open.get(request.home)
        if worker is None or not worker.prefixes.enabled:
            return None
        num_blocks, rest = divmod(num_tokens, worker.rows.block_size)
        block = None if rest else worker.prefixes.cached_block(request, num_blocks)
        return None if block is None else (worker.epoch, block)

    def resume(self, event: ev.ResumeAsked, now: float) -> None:
        """Respond with a request's retained log. If the request is still live for an earlier client, end it there."""
        live = self.identified.live(event.identity)
        if live is not None:
            self.end(
                live,
                EndReason.CANCELLED,
                now,
                message="request cancelled: another call continues it; read the rest of the answer there",
            )
        self.identified.answer(event)

    def drop(self, identities: tuple[bytes, ...], now: float) -> None:
        """End requests and drop their logs."""
        for identity in identities:
            live = self.identified.live(identity)
            if live is not None:
                self.end(live, EndReason.CANCELLED, now, message="the request was cancelled", keep=False)
            self.identified.drop(identity)

    def drop_swapped(self, request: Request) -> None:
        """Free the host memory of a request that has ended or continued on another worker."""
        if request.swapped is not None:
            for worker in self._fleet:
                worker.release_swapped(request, last_step=worker.last_step)
            request.swapped = None

    # ---------------------------------------------------------------- time

    def time_passed(self, now: float) -> None:
        """End the requests whose deadline has passed."""
        self.identified.time_passed(now)
        if self.sessions is not None:
            self.sessions.time_passed(now)
            self.backlog.open_gate(now)
        while self._doubtful_grammars:
            self.refuse_grammar(self._doubtful_grammars.popitem()[0], now)
        unserved = (request for request in self.backlog if self.backlog.returns_to(request) is None)
        for request, reason, message in self._timeouts.overdue(unserved, self._states.stranded, now):
            self.end(request, reason, now, message=message)

    def validate(self) -> None:
        """Check that every request is in the container for its state."""
        for worker in self._fleet:
            for row in worker.rows.occupied():
                request = worker.rows.requests[row]
                assert request is not None
                assert self._states.row_of(request.key) == (worker, row)
        self.backlog.validate()
        if self.sessions is not None:
            self.sessions.validate()
        self._states.validate(self._requests)
        waiting = [request for request in self._requests.values() if request.state in WAITING]
        for worker in self._fleet:
            worker.swap.validate(
                [r.swapped for r in waiting if r.swapped is not None and r.swapped.epoch == worker.epoch]
            )
