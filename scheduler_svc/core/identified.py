"""Requests whose clients may come back, told by their identities: the live ones, and what is kept of the others.

What becomes of a log is told in effects, as a journal needs it: begun with the request, ended with it, and dropped when
nothing is known of the request any longer.
"""

from scheduler_svc.core.effects import Effect, LogBegun, LogDropped, LogEnded, ResumeAnswered
from scheduler_svc.core.events import LogsRestored, RequestArrived, ResumeAsked
from scheduler_svc.core.kept import KeptLogs
from scheduler_svc.core.records import Log, RequestEnded
from scheduler_svc.core.request import Request


class IdentifiedRequests:
    """Those of one core; what is to be done goes to `effects`."""

    def __init__(self, keep_s: float, max_bytes: int, effects: list[Effect]) -> None:
        self._live: dict[bytes, Request] = {}
        self._kept = KeptLogs(keep_s, max_bytes)
        self._effects = effects

    def live(self, identity: bytes) -> Request | None:
        """The live request of this identity."""
        return self._live.get(identity)

    def knows(self, identity: bytes) -> bool:
        """Whether a request is live, or a log of it is kept."""
        return identity in self._live or identity in self._kept

    def began(self, request: Request, event: RequestArrived) -> None:
        """A request has arrived with an identity that no live one has; it goes on with what is kept of it."""
        log = self._kept.get(event.identity)
        request.origin = event
        request.scores = list(log.scores) if log is not None else []
        self._live[event.identity] = request
        self._effects.append(LogBegun(request=event, scores=tuple(request.scores)))

    def ended(self, request: Request, end: RequestEnded | None, *, keep: bool, now: float) -> None:
        """A request is live no longer.

        Args:
            request: one that has begun here.
            end: how it ended, if it ended well.
            keep: whether its client may want to go on with it, so that a log is kept.
            now: the time.
        """
        origin, key = request.origin, request.key
        assert origin is not None
        del self._live[origin.identity]
        self._effects.append(LogEnded(frontend=key.frontend, stream=key.stream, identity=origin.identity, end=end))
        if not keep:
            self._kept.drop(origin.identity)
            self._effects.append(LogDropped(identity=origin.identity))
            return
        # A stop string is found again in all tokens, those that it cuts off included.
        log = Log(request=origin, tokens=request.tokens.tobytes(), scores=tuple(request.scores), end=end)
        self._gone(self._kept.put(origin.identity, log, now))

    def answer(self, event: ResumeAsked) -> None:
        """Hands out what is kept of a request, to go on with it."""
        log = self._kept.get(event.identity)
        self._effects.append(ResumeAnswered(frontend=event.frontend, number=event.number, log=log))

    def drop(self, identity: bytes) -> None:
        """Forgets what is kept of a request."""
        if self._kept.drop(identity):
            self._effects.append(LogDropped(identity=identity))

    def restore(self, event: LogsRestored, now: float) -> None:
        """Keeps what an earlier core knew."""
        for age, log in event.logs:
            self._gone(self._kept.put(log.request.identity, log, now - age))

    def time_passed(self, now: float) -> None:
        """Forgets what is too old."""
        self._gone(self._kept.time_passed(now))

    def _gone(self, identities: list[bytes]) -> None:
        """Logs were given up; of a request that is live again, there will be a newer one."""
        self._effects.extend(LogDropped(identity=identity) for identity in identities if identity not in self._live)
