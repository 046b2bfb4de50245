"""Front ends: each row's front-end number, and the delivery of a step's tokens.

A step may give tokens to thousands of rows from a few front ends. Each row stores its front end's number, so tokens are
grouped with array operations into one batch per front end.
"""

import numpy as np

from scheduler_svc.core.interface.arrays import Int32Array
from scheduler_svc.core.interface.effects import Effect, TokensReady
from scheduler_svc.core.interface.records import Peer
from scheduler_svc.core.planning.results import Settled
from scheduler_svc.core.workers.rows import RowTable


class Frontends:
    """One core's front ends; appends effects to `effects`."""

    def __init__(self, effects: list[Effect]) -> None:
        self.numbers: dict[Peer, int] = {}
        """Numbers of the connected front ends."""
        self._effects = effects
        self._peers: list[Peer | None] = []
        """For each number, its front end; None after it has left."""

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, peer: Peer) -> bool:
        return peer in self.numbers

    def join(self, peer: Peer) -> None:
        """Add a front end, which may already be present."""
        if peer in self.numbers:
            return
        if None not in self._peers:
            self._peers.append(None)
        number = self.numbers[peer] = self._peers.index(None)
        self._peers[number] = peer

    def leave(self, peer: Peer) -> None:
        """Remove a front end. None of its requests is in a row."""
        number = self.numbers.pop(peer, None)
        if number is not None:
            self._peers[number] = None

    def deliver(self, rows: RowTable, settled: Settled) -> None:
        """Append a step's tokens to the effects, one batch per front end."""
        streams = rows.stream[settled.rows] if settled.streams is None else settled.streams
        if len(self.numbers) == 1 and len(streams):
            (peer,) = self.numbers
            self._tell(peer, streams, settled.first_indices, settled.tokens, settled.counts)
        elif len(streams):
            owners = rows.frontend[settled.rows]
            for number in np.unique(owners).tolist():
                mine = owners == number
                owner = self._peers[number]
                assert owner is not None, "the rows of a front end that left are vacated"
                counts = settled.counts
                of_mine = mine if counts is None else np.repeat(mine, counts)
                self._tell(
                    owner,
                    streams[mine],
                    settled.first_indices[mine],
                    settled.tokens[of_mine],
                    None if counts is None else counts[mine],
                )
        if not settled.late:
            return
        late: dict[Peer, list[tuple[int, int, int]]] = {}
        for request, index, token in settled.late:
            late.setdefault(request.key.frontend, []).append((request.key.stream, index, token))
        for peer, entries in late.items():
            streams, first_indices, tokens = np.array(entries, np.int32).T
            self._tell(peer, streams, first_indices, tokens, None)

    def _tell(
        self,
        peer: Peer,
        streams: Int32Array,
        first_indices: Int32Array,
        tokens: Int32Array,
        counts: Int32Array | None,
    ) -> None:
        self._effects.append(
            TokensReady(frontend=peer, streams=streams, first_indices=first_indices, tokens=tokens, counts=counts)
        )
