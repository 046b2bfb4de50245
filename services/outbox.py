"""The tokens of one stream and how far its reader is: what was let out and not yet taken is the outbox.

A reader that keeps up takes one token at a time. While it lags, tokens pile up here and go out as one message: ids
appended, text concatenated. The pile is bounded by the credit that the core was given: a token costs four bytes of
credit, which go back only when the reader really took it. All tokens stay, four bytes each: a core that was lost is
replaced by telling the new one what was generated.
"""

from array import array
from typing import NamedTuple


class Batch(NamedTuple):
    """Tokens and text that go out as one message. (A tuple: one is made for every message.)"""

    first_index: int
    token_ids: list[int]
    text: str


class Outbox:
    """`taken <= released <= len(tokens)`: gone to the reader, free to go, received."""

    __slots__ = ("merged", "released", "taken", "text", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        """All tokens received from the core."""
        self.released = 0
        """Tokens that may go out."""
        self.taken = 0
        """Tokens that the reader was given."""
        self.text = ""
        """Text that waits with them."""
        self.merged = 0
        """Tokens that shared a message with an earlier one."""

    @property
    def waiting(self) -> list[int]:
        """The tokens that wait."""
        return self.tokens[self.taken : self.released].tolist()

    def take(self) -> Batch | None:
        """Everything that waits, or None."""
        first, count = self.taken, self.released - self.taken
        if not (count or self.text):
            return None
        batch = Batch(first, self.waiting, self.text)
        self.taken = self.released
        self.text = ""
        if count > 1:
            self.merged += count - 1
        return batch
