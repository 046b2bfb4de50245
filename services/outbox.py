"""What a stream has for its reader and the reader has not taken yet.

A reader that keeps up takes one token at a time. While it lags, tokens pile up here and go out as one message: ids
appended, text concatenated. The pile is bounded by the credit that the core was given: a token costs four bytes of
credit, which go back only when the reader really took it.
"""

from typing import NamedTuple

TOKEN_COST = 4
"""Bytes of credit per token."""


class Batch(NamedTuple):
    """Tokens and text that go out as one message. (A tuple: one is made for every message.)"""

    first_index: int
    token_ids: list[int]
    text: str


class Outbox:
    """The pile of one stream."""

    __slots__ = ("merged", "num_taken", "text", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """Tokens waiting."""
        self.text = ""
        """Text waiting."""
        self.num_taken = 0
        """Tokens taken so far, hence the index of the first one waiting."""
        self.merged = 0
        """Tokens that shared a message with an earlier one."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def put(self, token_ids: list[int], text: str = "") -> None:
        """Adds tokens, and text that became certain with them."""
        self.token_ids += token_ids
        self.text += text

    def take(self) -> Batch | None:
        """Everything that waits, or None."""
        token_ids = self.token_ids
        if not (token_ids or self.text):
            return None
        batch = Batch(self.num_taken, token_ids, self.text)
        self.num_taken += len(token_ids)
        if len(token_ids) > 1:
            self.merged += len(token_ids) - 1
        self.token_ids = []
        self.text = ""
        return batch
