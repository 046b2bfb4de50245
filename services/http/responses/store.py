"""Responses that a later request may continue with `previous_response_id`, in the memory of one front end."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to and including it, without instructions."""

    response: Json
    messages: list[Json]


class ResponseStore:
    """The last responses, up to a number of bytes; the oldest are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        """Create a store; 0 bytes: nothing is stored."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._stored: OrderedDict[tuple[str, str], tuple[int, str]] = OrderedDict()
        """By principal and response id: the size, and the response and its conversation as JSON."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is stored."""
        return self._max_bytes == 0

    def put(self, principal: str, stored: StoredResponse) -> None:
        """Store a response of a principal, unless it is larger than the store."""
        text = json.dumps([stored.response, stored.messages], ensure_ascii=False)
        size = len(text.encode())
        if size > self._max_bytes:
            return
        self._stored[principal, str(stored.response["id"])] = (size, text)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._bytes -= self._stored.popitem(last=False)[1][0]

    def get(self, principal: str, response_id: str) -> StoredResponse | None:
        """Return the response of a principal; None if it is not stored."""
        found = self._stored.get((principal, response_id))
        return None if found is None else StoredResponse(*json.loads(found[1]))

    def drop(self, principal: str, response_id: str) -> bool:
        """Forget a response; return whether it was stored."""
        found = self._stored.pop((principal, response_id), None)
        self._bytes -= 0 if found is None else found[0]
        return found is not None
