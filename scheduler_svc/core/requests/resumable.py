"""Requests with an identity, whose clients may reconnect: the live ones, and the retained logs of the others.

Effects tell a journal when a log begins (with the request), ends (with the request) and is dropped.
"""

from scheduler_svc.core.interface.effects import Effect, LogBegun, LogDropped, LogEnded, ResumeAnswered
from scheduler_svc.core.interface.events import LogsRestored, ResumeAsked
from scheduler_svc.core.interface.records import Log, RequestEnded
from scheduler_svc.core.requests.kept import KeptLogs
from scheduler_svc.core.requests.request import Request


class IdentifiedRequests:
    """A core's requests with an identity; appends its effects to `effects`."""

    def __init__(self, keep_s: float, max_bytes: int, effects: list[Effect]) -> None:
        self._live: dict[bytes, Request] = {}
        self._kept = KeptLogs(keep_s, max_bytes)
        self._effects = effects

    def live(self, identity: bytes) -> Request | None:
        """Return the live request with this identity, or None."""
        return self._live.get(identity)

    def knows(self, identity: bytes) -> bool:
        """Return whether a request with this identity is live or has a retained log."""
        return identity in self._live or identity in self._kept

    def began(self, request: Request) -> None:
        """Register an accepted request, and continue from its kept log if there is one.

        No other live request has its identity.
        """
        identity = request.spec.identity
        log = self._kept.get(identity)
        request.is_logged = True
        if log is not None:
            request.accepted = True
            # The client may have fewer tokens than the log. Generate the missing tokens again.
            request.scores = [each for each in log.scores if each[0] < request.num_generated]
            request.prompt_charged |= log.charged_tokens > 0
        self._live[identity] = request
        self._effects.append(
            LogBegun(
                frontend=request.key.frontend,
                stream=request.key.stream,
                spec=request.spec,
                tokens=request.tokens.tobytes(),
                scores=tuple(request.scores),
            )
        )

    def ended(self, request: Request, end: RequestEnded | None, *, keep: bool, now: float) -> None:
        """Remove a request that is not live any more.

        Args:
            request: a request that `began` has registered.
            end: end of a completed request; None if it can continue.
            keep: whether to retain a log, because the client may want to continue the request.
            now: the time, s.
        """
        identity, key = request.spec.identity, request.key
        del self._live[identity]
        self._effects.append(LogEnded(frontend=key.frontend, stream=key.stream, identity=identity, end=end))
        if not keep:
            self._kept.drop(identity)
            self._effects.append(LogDropped(identity=identity))
            return
        # Keep tokens after a stop string too, because the stop string is searched for again in all tokens.
        log = Log(
            spec=request.spec,
            tokens=request.tokens.tobytes(),
            scores=tuple(request.scores),
            end=end,
            charged_tokens=len(request.tokens) if request.prompt_charged else 0,
        )
        self._gone(self._kept.put(identity, log, now))

    def answer(self, event: ResumeAsked) -> None:
        """Respond with a request's retained log, so that a client can continue it."""
        log = self._kept.get(event.identity)
        self._effects.append(ResumeAnswered(frontend=event.frontend, number=event.number, log=log))

    def drop(self, identity: bytes) -> None:
        """Drop the retained log of a request."""
        if self._kept.drop(identity):
            self._effects.append(LogDropped(identity=identity))

    def restore(self, event: LogsRestored, now: float) -> None:
        """Keep the logs of an earlier core."""
        for age, log in event.logs:
            self._gone(self._kept.put(log.spec.identity, log, now - age))

    def time_passed(self, now: float) -> None:
        """Drop logs that are too old."""
        self._gone(self._kept.time_passed(now))

    def _gone(self, identities: list[bytes]) -> None:
        """Report dropped logs, except for requests that are live again, which will get new logs."""
        self._effects.extend(LogDropped(identity=identity) for identity in identities if identity not in self._live)
