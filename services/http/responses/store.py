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
        self._of_items: dict[tuple[str, str], str] = {}
        """By principal and id of an output item: its response."""

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
        response_id = str(stored.response["id"])
        self._stored[principal, response_id] = (size, text)
        self._of_items.update({(principal, item): response_id for item in _item_ids(stored.response)})
        self._bytes += size
        while self._bytes > self._max_bytes:
            self.drop(*next(iter(self._stored)))

    def get(self, principal: str, response_id: str) -> StoredResponse | None:
        """Return the response of a principal; None if it is not stored."""
        found = self._stored.get((principal, response_id))
        return None if found is None else StoredResponse(*json.loads(found[1]))

    def item(self, principal: str, item_id: str) -> Json | None:
        """Return an output item of a principal's responses; None if it is not stored."""
        stored = self.get(principal, self._of_items.get((principal, item_id), ""))
        items: list[Json] = [] if stored is None else stored.response["output"]
        return next((item for item in items if item["id"] == item_id), None)

    def drop(self, principal: str, response_id: str) -> bool:
        """Forget a response; return whether it was stored."""
        found = self._stored.pop((principal, response_id), None)
        if found is None:
            return False
        self._bytes -= found[0]
        for item in _item_ids(json.loads(found[1])[0]):
            del self._of_items[principal, item]
        return True


def _item_ids(response: Json) -> list[str]:
    return [item["id"] for item in response.get("output", ())]
