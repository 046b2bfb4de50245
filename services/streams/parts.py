"""Sizes of parser events, for clients that resume after receiving some of them."""

from collections.abc import Sequence
from dataclasses import replace

from services.parsers import CallBegun, CallEnded, Event


def size_of(events: Sequence[Event]) -> int:
    """Return the total size of events: the bytes of their texts, and 1 for each start and end of a call."""
    return sum(1 if isinstance(event, CallBegun | CallEnded) else len(event.text.encode()) for event in events)


def without_first(events: Sequence[Event], size: int) -> list[Event]:
    """Return the events after the first `size` units."""
    rest: list[Event] = []
    for event in events:
        own = size_of((event,))
        if size >= own:
            size -= own
        elif size and not isinstance(event, CallBegun | CallEnded):
            rest.append(replace(event, text=event.text.encode()[size:].decode("utf-8", "replace")))
            size = 0
        else:
            rest.append(event)
    return rest
