"""Token history: all known tokens of each row on the host, from which drafts are proposed.

Only a worker that speculates keeps it. A step takes its base token from it too: the last token of a row with drafts.
"""

from array import array

from worker_svc.interface.arrays import Int32Array


class TokenHistory:
    """Known tokens of all rows."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def admit(self, row: int, tokens: Int32Array) -> None:
        """Begin a row with its prompt and the output that was generated before."""
        self._tokens[row] = array("i", tokens.astype("=i4", copy=False).tobytes())

    def append(self, row: int, token: int) -> None:
        """Append a sampled token to a row."""
        self._tokens[row].append(token)

    def leave(self, row: int) -> None:
        """Forget a row that leaves."""
        self._tokens.pop(row, None)

    def tokens(self, row: int) -> "array[int]":
        """Return all known tokens of a row in use; the caller must not change them."""
        return self._tokens[row]
