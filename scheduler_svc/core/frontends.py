"""The front ends: the small number of each in the rows of its requests, and which of a step's tokens go to whom.

A step may give a token to thousands of rows of a few front ends. With the owner's number in the row, tokens are shared
out as arrays, one batch for each front end.
"""

import numpy as np

from scheduler_svc.core.arrays import Int32Array
from scheduler_svc.core.commit import Settled
from scheduler_svc.core.effects import Effect, TokensReady
from scheduler_svc.core.records import Peer
from scheduler_svc.core.rows import RowTable


class Frontends:
    """Those of one core; what is to be told goes to `effects`."""

    def __init__(self, effects: list[Effect]) -> None:
        self.numbers: dict[Peer, int] = {}
        """Of those that are there."""
        self._effects = effects
        self._peers: list[Peer | None] = []
        """By number; None where a front end has left."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.numbers

    def join(self, peer: Peer) -> None:
        """A front end is there; it may have been before."""
        if peer in self.numbers:
            return
        if None not in self._peers:
            self._peers.append(None)
        number = self.numbers[peer] = self._peers.index(None)
        self._peers[number] = peer

    def leave(self, peer: Peer) -> None:
        """A front end has gone, and no row is one of its requests'."""
        number = self.numbers.pop(peer, None)
        if number is not None:
            self._peers[number] = None

    def deliver(self, rows: RowTable, settled: Settled) -> None:
        """Tells front ends the tokens of a step."""
        streams = rows.stream[settled.rows]
        if len(self.numbers) == 1 and len(streams):
            (peer,) = self.numbers
            self._tell(peer, streams, settled.first_indices, settled.tokens)
        elif len(streams):
            owners = rows.frontend[settled.rows]
            for number in np.unique(owners).tolist():
                mine = owners == number
                owner = self._peers[number]
                assert owner is not None, "the rows of a front end that left are vacated"
                self._tell(owner, streams[mine], settled.first_indices[mine], settled.tokens[mine])
        late: dict[Peer, list[tuple[int, int, int]]] = {}
        for request, index, token in settled.late:
            late.setdefault(request.key.frontend, []).append((request.key.stream, index, token))
        for peer, entries in late.items():
            streams, first_indices, tokens = np.array(entries, np.int32).T
            self._tell(peer, streams, first_indices, tokens)

    def _tell(self, peer: Peer, streams: Int32Array, first_indices: Int32Array, tokens: Int32Array) -> None:
        self._effects.append(TokensReady(frontend=peer, streams=streams, first_indices=first_indices, tokens=tokens))
