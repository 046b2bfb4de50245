"""Histories of the most recently ended requests, so that an operator can see why a request was slow."""

from collections.abc import Iterator
from typing import NamedTuple

from scheduler_svc.core.interface.records import Line, Note, to_note
from scheduler_svc.core.requests.request import Request, RequestKey

MAX_ENDED = 1024
"""Number of stored histories; each has at most as many lines as a live request's history."""


class Story(NamedTuple):
    """History of one request."""

    key: RequestKey
    request_id: str
    lines: list[Line]
    """Oldest first; bounded."""
    outcome: str = ""
    """The end reason; "" while the request is live."""

    @property
    def live(self) -> bool:
        """Whether the request has not ended."""
        return not self.outcome

    @property
    def notes(self) -> list[Note]:
        """Notes, oldest first."""
        return [to_note(self.key, line) for line in self.lines]

    @property
    def events(self) -> list[tuple[float, str]]:
        """Return (time on the core's clock, text) of each note."""
        return [(note.time, note.line) for note in self.notes]


def story_of(request: Request, outcome: str = "") -> Story:
    """Return the history of a request, which is live if there is no `outcome`."""
    return Story(request.key, request.spec.request_id, request.story, outcome)


class History:
    """Bounded store of the histories of ended requests."""

    def __init__(self) -> None:
        self._ended: dict[RequestKey, Story] = {}

    def keep(self, request: Request, outcome: str) -> None:
        """Store an ended request's history with this reason."""
        ended = self._ended
        ended.pop(request.key, None)  # If a stream is submitted again, its newest entry comes last.
        ended[request.key] = story_of(request, outcome)
        if len(ended) > MAX_ENDED:
            del ended[next(iter(ended))]

    def get(self, key: RequestKey) -> Story | None:
        """Return the history of an ended request, or None."""
        return self._ended.get(key)

    def __iter__(self) -> Iterator[Story]:
        """Iterate over the histories, oldest first; a client may reuse an id, and several choices share one."""
        return iter(self._ended.values())
