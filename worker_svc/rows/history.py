"""Token history: all known tokens of each row on the host, from which drafts are proposed.

Only a worker that speculates keeps the history. A step also reads the base token of a row with drafts from it, which is
the row's last token.
"""

from array import array

import numpy as np

from worker_svc.interface.arrays import Int32Array, IntArray


class TokenHistory:
    """Known tokens of all rows."""

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}

    def admit(self, row: int, tokens: Int32Array) -> None:
        """Begin a row with its prompt and the output that was generated before."""
        self._tokens[row] = array("i", tokens.astype("=i4", copy=False).tobytes())

    def extend(self, rows: IntArray, tokens: Int32Array) -> None:
        """Append sampled tokens, grouped by row."""
        if not len(rows):
            return
        firsts = np.flatnonzero(np.diff(rows, prepend=-1))
        packed = tokens.astype("=i4", copy=False).tobytes()
        ends = [*firsts[1:].tolist(), len(rows)]
        for row, first, end in zip(rows[firsts].tolist(), firsts.tolist(), ends, strict=True):
            self._tokens[row].frombytes(packed[4 * first : 4 * end])

    def leave(self, row: int) -> None:
        """Forget a row that leaves."""
        self._tokens.pop(row, None)

    def tokens(self, row: int) -> "array[int]":
        """Return all known tokens for a row in use; the caller must not change them."""
        return self._tokens[row]
