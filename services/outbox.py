"""What a stream has for its reader and the reader has not taken yet.

A reader that keeps up takes one token at a time. While it lags, tokens pile up here and go out as one message: ids
appended, text concatenated. The pile is bounded by the credit that the core was given: a token costs four bytes of
credit, which go back only when the reader really took it.
"""

from dataclasses import dataclass

TOKEN_COST = 4
"""Bytes of credit per token."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens and text that go out as one message."""

    first_index: int
    token_ids: list[int]
    text: str


class Outbox:
    """The pile of one stream."""

    __slots__ = ("_first_index", "_text", "_token_ids", "merged")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._first_index = 0
        self.merged = 0
        """Tokens that shared a message with an earlier one."""

    def __len__(self) -> int:
        """Tokens waiting."""
        return len(self._token_ids)

    @property
    def num_taken(self) -> int:
        """Tokens taken so far."""
        return self._first_index

    def put(self, token_ids: list[int], text: str = "") -> None:
        """Adds tokens, and text that became certain with them."""
        self._token_ids += token_ids
        if text:
            self._text.append(text)

    def take(self) -> Batch | None:
        """Everything that waits, or None."""
        token_ids = self._token_ids
        if not token_ids and not self._text:
            return None
        batch = Batch(self._first_index, token_ids, "".join(self._text))
        self._first_index += len(token_ids)
        self.merged += max(len(token_ids) - 1, 0)
        self._token_ids = []
        if self._text:
            self._text = []
        return batch
