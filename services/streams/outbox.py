"""Outbox of one stream: released tokens and text that the client has not read.

A fast client gets one token per message. If a client reads slowly, tokens accumulate here and are sent as one message.
Credit limits the outbox's size: a token costs four bytes of credit, which are returned only when the client has read
the token. All tokens stay in memory (four bytes each), because a new core needs all generated tokens if the old core is
lost.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from services.parsers import Event


class Batch(NamedTuple):
    """Tokens and text for one message. A tuple, because one is created per message."""

    first_index: int
    token_ids: list[int]
    text: str
    events: Sequence[Event] = ()
    """Events of the stream's parser for the text."""


class Outbox:
    """Token positions of a stream, with `taken <= released <= len(tokens)`."""

    __slots__ = ("merged", "released", "taken", "text", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        """All tokens received from the core."""
        self.released = 0
        """Number of tokens that may be sent."""
        self.taken = 0
        """Number of tokens taken for the client."""
        self.text = ""
        """Text that waits together with the tokens."""
        self.merged = 0
        """Number of tokens that shared a message with an earlier one."""

    @property
    def waiting(self) -> list[int]:
        """Tokens that wait to be sent to the client."""
        first = self.taken
        if self.released - first == 1:
            return [self.tokens[first]]
        return self.tokens[first : self.released].tolist()

    def take(self, to_text: Callable[[list[int]], str] | None = None) -> Batch | None:
        """Return everything that waits, or None; `to_text` converts the tokens if their text is not there yet."""
        first, count = self.taken, self.released - self.taken
        if not count and not self.text:
            return None
        token_ids = self.waiting
        batch = Batch(first, token_ids, self.text if to_text is None else self.text + to_text(token_ids))
        self.taken = self.released
        self.text = ""
        if count > 1:
            self.merged += count - 1
        return batch
