"""What became of requests that are over: the stories of the newest ones, for whoever asks why something took long."""

from collections import deque
from typing import NamedTuple

from scheduler_svc.core.request import Request

MAX_ENDED = 1024
"""Stories that are kept; each has at most as many lines as a live request's."""


class Story(NamedTuple):
    """What happened to one request, oldest first."""

    request_id: str
    live: bool
    events: list[tuple[float, str]]
    """When, on the core's clock, and what."""


class History:
    """A bounded record of ends."""

    def __init__(self) -> None:
        self._ended: deque[Story] = deque(maxlen=MAX_ENDED)

    def keep(self, request: Request) -> None:
        """A request is over."""
        self._ended.append(Story(request.request_id, False, request.story))

    def stories(self, request_id: str) -> list[Story]:
        """Those of one id, oldest first: a client may have used it again, and several choices share one."""
        return [story for story in self._ended if story.request_id == request_id]
