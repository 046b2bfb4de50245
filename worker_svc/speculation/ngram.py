"""N-gram proposer (prompt lookup): a row continues as its own text continued after the same tokens.

The last tokens of a row are searched in its earlier tokens. The longest match wins, among equal ones the latest, and
the tokens after it are proposed. A match that runs into the end of the text repeats itself, so that a short period is
continued as far as wanted.

A search compares the last token with the last `_WINDOW` tokens, as arrays: less work than to keep an index while texts
have some ten thousand tokens. Only the latest `_CANDIDATES` places with the last two tokens are compared further.
"""

from collections.abc import Sequence

import numpy as np

from worker_svc.interface.arrays import Int32Array, IntArray
from worker_svc.interface.plan import Plan
from worker_svc.model.base import KVCache
from worker_svc.rows.table import RowTable

_WINDOW = 1 << 15
"""Most recent tokens of a row that are searched."""
_SHORTEST, _LONGEST = 2, 16
"""Bounds of the length of a match. A longer match is not a better one."""
_CANDIDATES = 16
"""Most places of a search."""
_BACK = np.arange(_LONGEST)


def search(text: Int32Array, candidates: int = _CANDIDATES) -> tuple[int, int]:
    """Return the place of the last token of the best match in `text`, and its length; (0, 0) without a match.

    At most `candidates` places are compared, the latest ones.
    """
    end = len(text) - 1
    if end < _SHORTEST:
        return 0, 0
    last = text[-1]
    places = np.flatnonzero(text[1:-1] == last) + 1
    if len(places):
        places = places[text[places - 1] == text[-2]][-candidates:]
    if not len(places):
        return 0, 0
    longest = min(_LONGEST, end)
    index = places[:, None] - _BACK[:longest]
    # The first column always matches. A match ends before the first mismatch.
    differs = (text[index] != text[end - _BACK[:longest]]) | (index < 0)
    lengths = np.where(differs.any(axis=1), differs.argmax(axis=1), longest)
    best = len(places) - 1 - int(lengths[::-1].argmax())
    return int(places[best]), int(lengths[best])


def continuation(text: Int32Array, place: int, count: int) -> list[int]:
    """Return the `count` tokens after `place`, which continue with themselves after the last known token."""
    after: list[int] = text[place + 1 : place + 1 + count].tolist()
    while len(after) < count:
        after += after[: count - len(after)]
    return after


class NgramProposer:
    """Proposer that searches the text of each row."""

    def __init__(self, table: RowTable, caches: Sequence[KVCache] = ()) -> None:
        """Create a proposer; it needs no KV cache."""
        self._table = table

    def propose(self, rows: IntArray, most: IntArray) -> Sequence[Sequence[int]]:
        """See `Proposer.propose`. A row has no more drafts than tokens that match."""
        return [self._continue(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """See `Proposer.prefill`; nothing is kept."""

    def follow(self, plan: Plan) -> None:
        """See `Proposer.follow`; nothing is kept."""

    def clear(self) -> None:
        """See `Proposer.clear`; nothing is kept."""

    def _continue(self, row: int, most: int) -> Sequence[int]:
        tokens = self._table.known_tokens(row)
        text = np.frombuffer(tokens, np.int32)[-_WINDOW:]
        place, length = search(text)
        return continuation(text, place, min(most, length)) if length else ()
