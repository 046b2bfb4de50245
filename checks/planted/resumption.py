"""Bugs in data that is retained for resuming clients: logs, their log-probabilities, and the journal."""

import dataclasses
from typing import Any

import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import adaptation, both, with_limits
from scheduler_svc.core.interface.effects import LogDropped
from scheduler_svc.core.lifecycle.registry import RequestRegistry
from scheduler_svc.core.requests.kept import KeptLogs
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.requests.resumable import IdentifiedRequests
from scheduler_svc.journal.book import Book, Entry
from scheduler_svc.journal.journal import Journal

_RETURNS = adaptation("clients that come back")


@bug("resume.kept", "log.dropped", "log.begun", aim=both(_RETURNS, with_limits(resume_keep_bytes=2_000)))
def dropped_for_room_in_silence(patch: pytest.MonkeyPatch) -> None:
    """Logs that are dropped to make room are not reported."""

    def silent(put: Any, self: KeptLogs, identity: bytes, log: Any, now: float) -> list[bytes]:
        put(self, identity, log, now)
        return []

    wrap(patch, KeptLogs, "put", silent)


@bug("resume.kept", "journal.logs", aim=adaptation("logs that expire"))
def expired_in_silence(patch: pytest.MonkeyPatch) -> None:
    """Logs that are dropped because they are too old are not reported."""

    def silent(time_passed: Any, self: KeptLogs, now: float) -> list[bytes]:
        time_passed(self, now)
        return []

    wrap(patch, KeptLogs, "time_passed", silent)


@bug("log.dropped", "resume.kept", "journal.logs", aim=adaptation("logs that expire"))
def live_logs_reported_as_dropped(patch: pytest.MonkeyPatch) -> None:
    """The old log of a request that is live again is reported as dropped."""

    def gone(self: IdentifiedRequests, identities: list[bytes]) -> None:
        self._effects.extend(LogDropped(identity=identity) for identity in identities)

    patch.setattr(IdentifiedRequests, "_gone", gone)


@bug("resume.dropped", aim=_RETURNS)
def dropped_log_kept(patch: pytest.MonkeyPatch) -> None:
    """When a client drops the log of a complete request, the log is retained."""
    patch.setattr(IdentifiedRequests, "drop", lambda self, identity: None)


@bug("resume.scores", aim=_RETURNS)
def scores_forgotten_on_resumption(patch: pytest.MonkeyPatch) -> None:
    """The log-probabilities of the tokens before a resumption are missing from the next log."""

    def forget(began: Any, self: IdentifiedRequests, request: Request) -> None:
        began(self, request)
        request.scores = []

    wrap(patch, IdentifiedRequests, "began", forget)


@bug("resume.scores", aim=_RETURNS)
def scores_shared_with_the_log(patch: pytest.MonkeyPatch) -> None:
    """The log of a request whose client has left lacks the newest log-probabilities."""

    def fewer(put: Any, self: KeptLogs, identity: bytes, log: Any, now: float) -> Any:
        return put(self, identity, dataclasses.replace(log, scores=log.scores[:-1]), now)

    wrap(patch, KeptLogs, "put", fewer)


@bug("resume.end", "resume.kept", aim=_RETURNS)
def complete_log_goes_on(patch: pytest.MonkeyPatch) -> None:
    """A complete request's log lacks its end, so the client would continue the request."""

    def endless(put: Any, self: KeptLogs, identity: bytes, log: Any, now: float) -> Any:
        return put(self, identity, dataclasses.replace(log, end=None), now)

    wrap(patch, KeptLogs, "put", endless)


@bug("resume.kept", aim=_RETURNS)
def log_of_refused_dropped(patch: pytest.MonkeyPatch) -> None:
    """A second request with the same id, which is refused, drops the log kept for the first."""

    def drop(refuse: Any, self: RequestRegistry, request: Request, *how: Any, **more: Any) -> None:
        if request.spec.identity and not request.is_logged:
            self.identified._kept.drop(request.spec.identity)
        refuse(self, request, *how, **more)

    wrap(patch, RequestRegistry, "refuse", drop)


@bug("journal.logs", "resume.tokens", aim=_RETURNS)
def journal_forgets_tokens(patch: pytest.MonkeyPatch) -> None:
    """The journal records the tokens of only the first effect of a turn."""

    def first_only(note: Any, self: Journal, effect: Any, streams: Any) -> None:
        if not self._columns[0]:
            note(self, effect, streams)

    wrap(patch, Journal, "_note_tokens", first_only)


@bug("journal.logs", aim=_RETURNS)
def journal_keeps_dropped(patch: pytest.MonkeyPatch) -> None:
    """The journal keeps the logs that the core has dropped."""

    def keep(apply: Any, self: Book, batch: Any, *segment: int) -> None:
        batch.ClearField("dropped")
        apply(self, batch, *segment)

    wrap(patch, Book, "apply", keep)


@bug("resume.scores", aim=_RETURNS)
def journal_forgets_scores(patch: pytest.MonkeyPatch) -> None:
    """A rewritten journal entry lacks its log-probabilities."""

    def without(record: Any, self: Entry) -> Any:
        whole = record(self)
        whole.ClearField("scores")
        return whole

    wrap(patch, Entry, "record", without)


@bug("journal.logs", "resume.tokens", aim=_RETURNS)
def journal_drops_live(patch: pytest.MonkeyPatch) -> None:
    """A new segment starts without the requests that are live."""
    wrap(
        patch,
        Book,
        "__iter__",
        lambda entries, self: (entry for entry in entries(self) if not entry.live),
    )
