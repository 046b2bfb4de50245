"""Stores responses in one front end's memory, so that later requests can continue them with `previous_response_id`."""

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from heapq import heapify, heappush, heapreplace
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to and including it, without instructions."""

    response: Json
    messages: list[Json]
    num_input: int
    """Number of the messages before the response."""
    session_id: str = ""
    """The scheduler's name for the conversation."""


@dataclass(slots=True)
class _Held:
    """The responses of one principal."""

    responses: OrderedDict[str, "_Entry"] = field(default_factory=OrderedDict)
    """By response id; oldest first."""
    items: dict[str, str] = field(default_factory=dict)
    """Output items as JSON, by item id; the same texts as in the entries.

    A request may refer to thousands of items, so finding one must not read the whole response, which has megabytes.
    """
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """A stored response."""

    size: int
    """Bytes of the text and of the items."""
    text: str
    """The stored response as JSON, without its output items."""
    items: tuple[str, ...]
    """Its output items as JSON."""
    item_ids: tuple[str, ...]
    """Ids of its output items."""


class ResponseStore:
    """The latest responses, up to a maximum number of bytes.

    The store evicts the oldest response of the principal with the most bytes. No principal can therefore evict
    responses of principals that hold less.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create a store; 0 bytes disables it."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._of: dict[str, _Held] = {}
        """Responses by principal; principals without responses have no entry."""
        self._by_size: list[tuple[int, str]] = []
        """A heap of (negative bytes, principal). Each principal has at least one entry with at least its current
        bytes.
        """

    @property
    def is_off(self) -> bool:
        """Whether nothing is stored."""
        return self._max_bytes == 0

    def put(self, principal: str, stored: StoredResponse) -> None:
        """Store a response of a principal, unless it is larger than the store."""
        output = stored.response.get("output", ())
        items = tuple(json.dumps(item, ensure_ascii=False) for item in output)
        item_ids = tuple(str(item["id"]) for item in output)
        response = stored.response | {"output": []} if items else stored.response
        text = json.dumps([response, stored.messages, stored.num_input, stored.session_id], ensure_ascii=False)
        size = sum(len(each.encode()) for each in (text, *items))
        response_id = str(stored.response["id"])
        self.drop(principal, response_id)
        if size > self._max_bytes:
            return
        held = self._of.setdefault(principal, _Held())
        held.responses[response_id] = _Entry(size, text, items, item_ids)
        held.items |= dict(zip(item_ids, items, strict=True))
        held.num_bytes += size
        self._bytes += size
        heappush(self._by_size, (-held.num_bytes, principal))
        if len(self._by_size) > 64 + 4 * len(self._of):
            self._by_size = [(-each.num_bytes, name) for name, each in self._of.items()]
            heapify(self._by_size)
        while self._bytes > self._max_bytes:
            largest = self._largest_holder()
            self.drop(largest, next(iter(self._of[largest].responses)))

    def get(self, principal: str, response_id: str) -> StoredResponse | None:
        """Return a principal's response; None if it is not stored."""
        held = self._of.get(principal)
        found = None if held is None else held.responses.get(response_id)
        if found is None:
            return None
        stored = StoredResponse(*json.loads(found.text))
        if found.items:
            stored.response["output"] = [json.loads(item) for item in found.items]
        return stored

    def item(self, principal: str, item_id: str) -> Json | None:
        """Return an output item from a principal's responses; None if it is not stored."""
        held = self._of.get(principal)
        text = None if held is None else held.items.get(item_id)
        return None if text is None else dict(json.loads(text))

    def drop(self, principal: str, response_id: str) -> bool:
        """Forget a response; return whether it was stored."""
        held = self._of.get(principal)
        found = None if held is None else held.responses.pop(response_id, None)
        if held is None or found is None:
            return False
        held.num_bytes -= found.size
        self._bytes -= found.size
        for item_id in found.item_ids:
            held.items.pop(item_id, None)
        if not held.responses:
            del self._of[principal]
        return True

    def _largest_holder(self) -> str:
        """Return the principal that holds the most bytes."""
        while True:
            listed, principal = self._by_size[0]
            held = self._of.get(principal)
            num_bytes = 0 if held is None else held.num_bytes
            if num_bytes == -listed:
                return principal
            heapreplace(self._by_size, (-num_bytes, principal))
