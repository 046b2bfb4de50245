"""Parser events: pieces of reasoning, content and tool calls in a model's output, in order."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a tool call, with the name of its function."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More arguments for the latest call, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of a tool call with complete arguments. If the output ends within a call, the call has no end event."""

    index: int


Event = Reasoning | Content | CallBegun | CallArguments | CallEnded
Emit = Callable[[Event], None]


def merged(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbouring pieces of the same text joined, so that the piece sizes are not visible."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            not isinstance(event, CallBegun | CallEnded)
            and not isinstance(last, CallBegun | CallEnded)
            and last is not None
            and type(last) is type(event)
            and (not isinstance(event, CallArguments) or event.index == getattr(last, "index", None))
        ):
            joined[-1] = replace(last, text=last.text + event.text)
        else:
            joined.append(event)
    return joined
