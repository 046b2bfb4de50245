"""Boundaries: places in prompts after which other requests can continue, if full blocks alone do not suffice.

With recurrent state or sliding windows, a request cannot continue after any cached block. A row in prefill therefore
chooses block boundaries at which it keeps what other requests need, and these requests wait for the boundary.
"""

from typing import NamedTuple

from shared.prefix_keys import KEY_BYTES, BlockKey


class _Wanted(NamedTuple):
    """A block boundary that a row in prefill has not reached."""

    num_blocks: int
    key: BlockKey
    """Key of the last of these blocks."""


class Boundaries:
    """The boundaries that the rows of one worker have not reached."""

    def __init__(self) -> None:
        self._wanted: dict[int, list[_Wanted]] = {}
        """By row in prefill: its boundaries, ascending."""

    def want(self, row: int, keys: bytes, counts: list[int]) -> BlockKey:
        """Set the boundaries of a row in prefill; return the key of the first one, or an empty key.

        Args:
            row: the row.
            keys: the joined keys of its blocks.
            counts: number of blocks before each boundary, ascending.
        """
        self._wanted[row] = [_Wanted(count, keys[KEY_BYTES * (count - 1) : KEY_BYTES * count]) for count in counts]
        return self.next_key(row)

    def next_key(self, row: int) -> BlockKey:
        """Return the key of the boundary that a row in prefill reaches next; empty if it reaches none."""
        wanted = self._wanted.get(row)
        return wanted[0].key if wanted else b""

    def awaited(self, keys: bytes, num_found: int) -> BlockKey:
        """Return the key of the longest boundary that a row reaches next and a request can use; empty if none.

        Args:
            keys: the joined keys that the request can share.
            num_found: number of blocks that it can share now.
        """
        longest, found = num_found, b""
        for wanted in self._wanted.values():
            for count, key in wanted[:1]:
                if count > longest and keys[KEY_BYTES * (count - 1) : KEY_BYTES * count] == key:
                    longest, found = count, key
        return found

    def reached(self, row: int, num_blocks: int) -> list[int]:
        """Remove and return the boundaries of a row in prefill that the plan being made reaches, in blocks."""
        wanted = self._wanted.get(row, [])
        found = [count for count, _ in wanted if count <= num_blocks]
        self._wanted[row] = wanted[len(found) :]
        if not self._wanted[row]:
            del self._wanted[row]
        return found

    def left(self, row: int) -> None:
        """Remove the boundaries of a row that leaves."""
        self._wanted.pop(row, None)
