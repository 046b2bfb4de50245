"""Steady rows: what stays the same about a worker's decode rows while these rows only continue.

In most steps of a busy worker, no request arrives, ends or lacks credit, and only the rows' lengths change. The other
columns are gathered once for such steps, and the rows that need a block in each of the next steps are known in advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_svc.core.interface.arrays import IndexArray, Int32Array
from scheduler_svc.core.interface.records import Peer


@dataclass(slots=True, eq=False)
class SteadyRows:
    """The decode rows' columns, valid until a row starts or stops decoding."""

    rows: IndexArray
    """The decode rows, ascending: the array `RowTable.decoding`."""
    column: bytes
    """The same rows as a worker sends them."""
    generations: Int32Array
    streams: Int32Array
    stops: Sequence[Int32Array] | None
    """The rows' stop tokens, one array per place; None if a row has more stop tokens than places."""
    traced: tuple[tuple[Peer, int], ...]
    """(front end, stream) of the traced requests."""
    indices: Int32Array | None = None
    """Index of each row's next token among its generated tokens, if known."""


@dataclass(slots=True, eq=False)
class Outlook:
    """Forecast of the next plans for the case that the decode rows only continue.

    It is valid until a plan changes the rows otherwise. Credit may only be added meanwhile.
    """

    plans_left: int
    """Number of plans until one in which a row may lack credit or reach its limit."""
    by_need: IndexArray
    """The rows in the order in which they need a block."""
    begins: list[int]
    """Positions in `by_need`. The rows between two of them need a block in the same plan."""
    at: int = 0
    """Index in `begins` for the next plan."""

    @property
    def num_needy(self) -> int:
        """Number of rows that need a block in the next plan."""
        return self.begins[self.at + 1] - self.begins[self.at]

    def next_plan(self) -> IndexArray:
        """Advance by one plan; return the rows that need a block in it, ascending."""
        at, begins = self.at, self.begins
        needy: IndexArray = self.by_need[begins[at] : begins[at + 1]]
        at += 1
        self.at = 0 if at == len(begins) - 1 else at
        self.plans_left -= 1
        return needy
