"""N-gram proposer (prompt lookup): a row continues as its own text continued after the same tokens.

The last tokens of a row are searched in its earlier tokens. The longest match wins, among equal ones the latest, and
the tokens after it are proposed. A match that runs into the end of the text repeats itself, so that a short period is
continued as far as wanted.

The search works like that of LZ77 compressors: a table has the last place of each pair of tokens, by hash, and each
place has the one before it with the same hash. A new token costs two writes. A search follows at most `_CANDIDATES`
places and compares at most `_LONGEST` tokens at each. Only the last `_WINDOW` tokens are searched, which bounds the
memory of a row. The index of a row begins with its first search.
"""

from array import array
from collections.abc import Sequence

from worker_svc.interface.arrays import IntArray
from worker_svc.interface.plan import Plan
from worker_svc.model.base import KVCache
from worker_svc.rows.table import RowTable

_WINDOW = 1 << 15
"""Most recent tokens of a row that are searched."""
_SHORTEST, _LONGEST = 2, 16
"""Bounds of the length of a match. A longer match is not a better one."""
_CANDIDATES = 16
"""Most places of a search."""
_MOST_INDEXED = 4096
"""Tokens that one step adds to the index of a row, which bounds the delay of the step."""
_NO_PLACES = array("i", [-1]) * _WINDOW


class NgramIndex:
    """Index of the pairs of one row's tokens."""

    __slots__ = ("_before", "_indexed", "_last")

    def __init__(self) -> None:
        self._indexed = 1  # the first pair ends at place 1
        self._last = _NO_PLACES[:]
        """Last place of a pair, by hash; a place is that of the pair's second token."""
        self._before = _NO_PLACES[:]
        """The place before each place with the same hash, by the place modulo `_WINDOW`."""

    def extend(self, tokens: "array[int]") -> bool:
        """Add the tokens after the last call to the index; return False if more of them are left."""
        first, end = max(self._indexed, len(tokens) - _WINDOW + 1), len(tokens)
        end = min(end, first + _MOST_INDEXED)
        last, before, mask = self._last, self._before, _WINDOW - 1
        for place in range(first, end):
            hashed = (tokens[place - 1] * 0x9E3779B1 ^ tokens[place] * 0x85EBCA77) >> 7 & mask
            before[place & mask] = last[hashed]
            last[hashed] = place
        self._indexed = max(self._indexed, end)
        return self._indexed >= len(tokens)

    def search(self, tokens: "array[int]", candidates: int = _CANDIDATES) -> tuple[int, int]:
        """Return the place of the last token of the best match, and its length; 0 without a match.

        All tokens must be in the index. At most `candidates` places are compared.
        """
        end = len(tokens) - 1
        if end < 1:
            return 0, 0
        suffix = tokens[max(end - _LONGEST + 1, 0) :]
        suffix.reverse()
        before, mask = self._before, _WINDOW - 1
        best, found, place = _SHORTEST - 1, 0, before[end & mask]
        for _ in range(candidates):
            if place <= end - _WINDOW or place < 1:
                break
            most = min(len(suffix), place + 1)
            length = 0
            while length < most and tokens[place - length] == suffix[length]:
                length += 1
            if length > best:
                best, found = length, place
                if length == len(suffix):
                    break
            place = before[place & mask]
        return (found, best) if found else (0, 0)


def continuation(tokens: "array[int]", place: int, count: int) -> list[int]:
    """Return the `count` tokens after `place`, which continue with themselves after the last known token."""
    period = len(tokens) - place - 1
    return [tokens[place + 1 + i % period] for i in range(count)]


class NgramProposer:
    """Proposer with one index per row that speculates."""

    def __init__(self, table: RowTable, caches: Sequence[KVCache] = ()) -> None:
        """Create a proposer; it needs no KV cache."""
        self._table = table
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, rows: IntArray, most: IntArray) -> Sequence[Sequence[int]]:
        """See `Proposer.propose`. A row has no more drafts than tokens that match."""
        return [self._continue(row, count) for row, count in zip(rows.tolist(), most.tolist(), strict=True)]

    def prefill(self, rows: IntArray, lengths: IntArray) -> None:
        """See `Proposer.prefill`; the text is known anyway."""

    def follow(self, plan: Plan) -> None:
        """See `Proposer.follow`; the blocks do not matter."""
        for row in plan.leaves.tolist():
            self._indexes.pop(row, None)

    def clear(self) -> None:
        """See `Proposer.clear`."""
        self._indexes.clear()

    def _continue(self, row: int, most: int) -> Sequence[int]:
        tokens = self._table.known_tokens(row)
        index = self._indexes.get(row)
        if index is None:
            index = self._indexes[row] = NgramIndex()
        if not index.extend(tokens):
            return ()
        place, length = index.search(tokens)
        if not length:
            return ()
        return continuation(tokens, place, min(most, length))
