"""Histories of ended requests: the newest ones are kept, so that an operator can see why a request took long."""

from collections import deque
from typing import NamedTuple

from scheduler_svc.core.requests.request import Request

MAX_ENDED = 1024
"""Number of histories that are kept; each has at most as many lines as a live request's."""


class Story(NamedTuple):
    """Events of one request, oldest first."""

    request_id: str
    live: bool
    events: list[tuple[float, str]]
    """(time on the core's clock, text)."""


def story_of(request: Request, *, live: bool) -> Story:
    """Return the history of a request."""
    return Story(request.spec.request_id, live, [(note.time, note.line) for note in request.story])


class History:
    """Bounded store of the histories of ended requests."""

    def __init__(self) -> None:
        self._ended: deque[Story] = deque(maxlen=MAX_ENDED)

    def keep(self, request: Request) -> None:
        """Store the history of a request that has ended."""
        self._ended.append(story_of(request, live=False))

    def stories(self, request_id: str) -> list[Story]:
        """Return the histories with this id, oldest first; a client may reuse an id, and several choices share one."""
        return [story for story in self._ended if story.request_id == request_id]
