"""The leader's side of replication: sends the journal to standbys, and notices that another scheduler leads.

Nothing here blocks. Parts are read from the journal's files, so a slow standby occupies no memory. The loop calls
`read` before it reads any other socket, and `send` after it has committed the journal.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from protos.quire.journal.v1.replication_pb2 import (
    JournalPart,
    PeerMessage,
    SchedulerMessage,
    Status,
    StepDown,
    SteppedDown,
)
from scheduler_svc.journal.journal import Journal
from scheduler_svc.standby.cursor import TIMEOUT_S, Part, Replica, replicated
from scheduler_svc.standby.election import Election
from scheduler_svc.standby.peers import PeerLink, bind, receive_peer
from shared.frames import STANDBY_VERSIONS
from shared.ids import draw_incarnation
from shared.logging import get_logger
from shared.sockets import Protect, SendOutcome, is_readable, send_to, wait_readable
from shared.versions import UnsupportedVersionError, negotiate, spoken

BATCH_S = 0.05
"""Minimum time between two parts if no token waits for a standby, seconds."""
TICK_S = 0.25
"""Interval of heartbeats to standbys and of announcements to other schedulers, seconds."""
_FLUSH_S = 1.0
"""Maximum time to send the rest of the journal before this scheduler steps down, seconds."""
_LISTEN_S = TICK_S + 0.1
"""Time to wait for an announcement of another leader, after this process was stopped, seconds."""

log = get_logger()


@dataclass(slots=True)
class _Standby:
    last_heard: float
    informed_at: float = -math.inf
    replica: Replica = field(default_factory=Replica)
    segment: int = 0
    descriptor: int = -1
    """Open file of `segment`; -1 if none."""

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(slots=True)
class StandbyStats:
    """Values for metrics."""

    ready: int = 0
    """Standbys that have the whole journal."""
    connected: int = 0
    lag_bytes: int = 0
    """Largest number of bytes that a connected standby does not have."""
    dropped: int = 0
    """Times that a standby was lost or was too slow."""
    copies: int = 0
    """Copies of the whole journal that were begun."""


class Standbys:
    """Connections of a leader to other schedulers.

    Args:
        context: context of the sockets.
        address: address for standbys; empty if there is none.
        others: addresses of other schedulers, which learn that this scheduler leads.
        number: number under which this scheduler leads.
        is_synchronous: whether tokens wait for a standby, so that each turn is sent at once.
        election: the lease of this scheduler; None without a lease.
        protect_server: sets up encryption of the socket for standbys.
        protect_client: sets up encryption of the sockets to other schedulers.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        address: str,
        others: Sequence[str],
        number: int,
        is_synchronous: bool = False,
        election: Election | None = None,
        protect_server: Protect = lambda _socket: None,
        protect_client: Protect = lambda _socket: None,
    ) -> None:
        self._election = election
        self._router = bind(context, address, protect_server) if address else None
        self._links = [PeerLink(context, other, protect_client) for other in others]
        self._number = number
        self._batch_s = 0.0 if is_synchronous else BATCH_S
        self._sent_at = -math.inf
        self._standbys: dict[bytes, _Standby] = {}
        self._ticked_at = -math.inf
        self._dropped = self._copies = 0
        self.successor = 0
        """Number of a scheduler that leads instead of this one; 0 for none."""
        self.must_be_silent = False
        """Whether the successor leads already, so that this scheduler must not send anything more."""

    @property
    def sockets(self) -> "tuple[zmq.Socket[bytes], ...]":
        """Sockets whose messages `read` handles."""
        links = tuple(link.socket for link in self._links)
        return links if self._router is None else (self._router, *links)

    @property
    def wake_at(self) -> float:
        """Time at which `send` must be called again even if nothing happens."""
        return self._ticked_at + TICK_S

    def acknowledged(self) -> float:
        """Return the journal position up to which every complete standby has a copy; infinite if none is complete."""
        return replicated(each.replica for each in self._standbys.values())

    def listen(self) -> None:
        """Wait for an announcement of another leader, after this process was stopped. With a lease, none is needed.

        A standby that asked this scheduler to step down may lead already, because it waits only a short time.
        """
        end = time.monotonic() + (_LISTEN_S if self._election is None else 0.0)
        while (now := time.monotonic()) < end and not self.must_be_silent:
            self.read(now)
            wait_readable(self.sockets, end - now)

    def may_send(self, now: float) -> bool:
        """Return whether this scheduler still leads. Without its lease, it steps down.

        The process may have been stopped since `read`, so ask again before anything is sent.
        """
        if self._election is not None and not self._election.may_send(now):
            if not self.successor:
                log.warning("leader lease: not renewed in time; if its store is slow, increase --leader-lease-s")
            # The holder of the next lease leads under this number or a higher one.
            self._step_down(self._number + 1, silent=True)
        return not self.must_be_silent

    def read(self, now: float) -> None:
        """Handle all messages that have arrived, and the end of the lease."""
        self.may_send(now)
        if self._router is not None and is_readable(self._router):
            while (received := receive_peer(self._router)) is not None:
                self._handle(*received, now)
        for link in self._links:
            if is_readable(link.socket):
                while (message := link.receive(now)) is not None:
                    if message.leads and message.leader_number > self._number:
                        self._step_down(message.leader_number, silent=True)

    def send(self, journal: Journal | None, now: float, *, num_workers: int) -> None:
        """Send what the standbys lack, and heartbeats."""
        if self._router is None and not self._links:
            return
        is_due = journal is not None and now - self._sent_at >= self._batch_s
        if is_due:
            self._sent_at = now
        for peer, standby in list(self._standbys.items()):
            if journal is not None and (is_due or standby.replica.replicated < 0):
                self._send_parts(peer, standby, journal, now)
            if now - standby.informed_at >= TICK_S:
                standby.informed_at = now
                self._send(peer, JournalPart(num_workers=num_workers))
        if now >= self.wake_at:
            self._ticked_at = now
            self._expire(now)
            announcement = PeerMessage(step_down=StepDown(leader_number=self._number, leads=True))
            for link in self._links:
                link.renew(now)
                link.send(announcement)

    def hand_over(self, journal: Journal | None, *, ends: bool) -> None:
        """Send the rest of the journal, waiting a short time, and with `ends` the end of this leadership."""
        end = time.monotonic() + _FLUSH_S
        while (now := time.monotonic()) < end:
            self.read(now)
            for peer, standby in list(self._standbys.items()):
                if journal is not None:
                    self._send_parts(peer, standby, journal, now)
            cursors = [each.replica.cursor for each in self._standbys.values()]
            waiting = [each for each in cursors if each.acknowledged < each.sent]
            if not waiting:
                break
            wait_readable(self.sockets, 0.02)
        for peer in self._standbys if ends else ():
            assert self._router is not None
            message = SchedulerMessage(leader_number=self._number, stepped_down=SteppedDown())
            send_to(self._router, peer, message.SerializeToString())

    def stats(self, journal: Journal | None) -> StandbyStats:
        extents = {} if journal is None else journal.extents
        lags = [
            cursor.sent - cursor.acknowledged
            + sum(size for number, size in extents.items() if number > cursor.segment)
            + max(0, extents.get(cursor.segment, 0) - cursor.offset)
            for cursor in (standby.replica.cursor for standby in self._standbys.values())
        ]  # fmt: skip
        ready = sum(each.replica.replicated >= 0 or journal is None for each in self._standbys.values())
        return StandbyStats(ready, len(self._standbys), max(lags, default=0), self._dropped, self._copies)

    def close(self) -> None:
        """Close the sockets; messages of `hand_over` are still sent."""
        for standby in self._standbys.values():
            standby.close()
        for link in self._links:
            link.close()
        if self._router is not None:
            self._router.close(linger=300)

    def _handle(self, peer: bytes, message: PeerMessage, now: float) -> None:
        standby = self._standbys.get(peer)
        match message.WhichOneof("body"):
            case "hello":
                hello = message.hello
                theirs = spoken(hello.protocol_version, hello.newest_protocol_version)
                try:
                    negotiate("standby", scheduler=STANDBY_VERSIONS, peer=theirs, role="standby")
                except UnsupportedVersionError as error:
                    self._reply(peer, SchedulerMessage(refused=str(error)))
                    return
                if standby is None:
                    log.info("standby joined", standby=peer.decode(errors="replace"))
                else:
                    standby.close()
                self._standbys[peer] = _Standby(now)
            case "ack" if standby is not None:
                standby.last_heard = now
                standby.replica.acknowledge(message.ack.num_bytes, message.ack.copy, now)
            case "step_down" if message.step_down.leader_number > self._number:
                self._step_down(message.step_down.leader_number, silent=message.step_down.leads)
            case "step_down" | "ack" | "take_over":
                self._reply(peer, SchedulerMessage(status=Status()))

    def _reply(self, peer: bytes, message: SchedulerMessage) -> None:
        assert self._router is not None
        message.leader_number, message.leads = self._number, True
        send_to(self._router, peer, message.SerializeToString())

    def _step_down(self, number: int, *, silent: bool) -> None:
        if number > self.successor:
            self.successor = number
            log.warning("stepping down: another scheduler may lead", leader_number=number, own=self._number)
        self.must_be_silent |= silent

    def _send_parts(self, peer: bytes, standby: _Standby, journal: Journal, now: float) -> None:
        extents, replica = journal.extents, standby.replica
        while (part := replica.cursor.next_part(extents)) is not None:
            data = self._read(standby, part, journal)
            if data is None:
                replica.cursor.restart()
                return
            if part.starts_over:
                # Another leader must not use the same number, because a standby may have a part of its copy.
                replica.start_over(draw_incarnation())
                self._copies += 1
            message = JournalPart(
                copy=replica.copy,
                segment=part.segment,
                offset=part.offset,
                data=data,
                starts_over=part.starts_over,
                is_complete=part.is_complete,
                oldest_segment=next(iter(extents)) if part.is_complete else 0,
                position=replica.position(part),
            )
            if not self._send(peer, message):
                return
            replica.sent(part, extents, journal.written, now)

    def _read(self, standby: _Standby, part: Part, journal: Journal) -> bytes | None:
        """Return the bytes of a part, or None if they no longer exist."""
        try:
            if standby.segment != part.segment or standby.descriptor < 0:
                standby.close()
                standby.segment = part.segment
                standby.descriptor = os.open(journal.path(part.segment), os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(standby.descriptor, part.num_bytes, part.offset)
        except OSError:
            return None
        return data if len(data) == part.num_bytes else None

    def _send(self, peer: bytes, part: JournalPart) -> bool:
        """Send a part; return False if the standby does not read now. Drop a standby that is gone."""
        assert self._router is not None
        message = SchedulerMessage(leader_number=self._number, leads=True, part=part)
        outcome = send_to(self._router, peer, message.SerializeToString())
        if outcome is SendOutcome.GONE:
            self._drop(peer, "its connection was closed")
        return outcome is SendOutcome.SENT

    def _expire(self, now: float) -> None:
        for peer, standby in list(self._standbys.items()):
            if now - standby.last_heard > TIMEOUT_S:
                self._drop(peer, "it was silent")
            elif standby.replica.give_up(now):
                self._dropped += 1
                log.warning("standby is too slow; nothing waits for it", standby=peer.decode(errors="replace"))

    def _drop(self, peer: bytes, reason: str) -> None:
        standby = self._standbys.pop(peer, None)
        if standby is not None:
            self._dropped += 1
            standby.close()
            log.warning("standby lost", standby=peer.decode(errors="replace"), reason=reason)
