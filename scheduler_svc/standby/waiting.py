"""A standby: mirrors the leader's journal until this scheduler leads.

A standby listens only on its --standby-address. With a lease in a store, it takes over as soon as it acquires the
lease. A standby that may have missed a part of the journal lets others acquire it first. Without a lease, the standby
takes over when an operator commands it. It first asks the leader to step down, and waits for the leader only a short
time, because the leader may have been lost.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from protos.quire.journal.v1.replication_pb2 import (
    JournalPart,
    PeerMessage,
    SchedulerMessage,
    StandbyAck,
    StandbyHello,
    Status,
    StepDown,
)
from scheduler_svc.journal.recovery import Found
from scheduler_svc.standby.cursor import Receipt
from scheduler_svc.standby.election import Election
from scheduler_svc.standby.leader_number import Numbers
from scheduler_svc.standby.mirror import GapError, Mirror
from scheduler_svc.standby.peers import PeerLink, bind, receive_peer
from scheduler_svc.standby.tenure import may_stand
from shared.config import ConfigError, SchedulerConfig, addresses
from shared.frames import STANDBY_VERSIONS
from shared.logging import get_logger
from shared.pulse import Pulse
from shared.sockets import Protect, is_readable, send_to, wait_readable

HELLO_S = 0.25
LONGEST_PAUSE_S = 30.0
"""Maximum time between two copies that cannot be written, for example because the disk is full, seconds."""
ACK_S = 0.25
"""Interval of acknowledgements if the leader does not wait for them, seconds. They also show that the standby lives."""
_READING_S = 0.1
"""Maximum time for the messages of one connection before the others are read, seconds."""
STEP_DOWN_S = 1.0
"""Maximum time for the leader to step down, seconds."""

log = get_logger()


@dataclass(frozen=True, slots=True)
class Succession:
    """Result of a standby that leads from now on."""

    number: int
    num_workers: int = 0
    """Number of workers that the last leader had; 0 if unknown."""
    found: Found | None = None
    """Content of the journal's folder; None if it must be read."""


NO_PREDECESSOR = Succession(0)


class Standby:
    """A scheduler that waits to lead.

    Args:
        config: its settings.
        numbers: the leader numbers that it knows.
        election: its lease; None without a lease.
        protect_server: sets up encryption of its own socket.
        protect_client: sets up encryption of its sockets to other schedulers.

    Raises:
        ConfigError: the journal's folder cannot be used.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        config: SchedulerConfig,
        numbers: Numbers,
        *,
        election: Election | None = None,
        protect_server: Protect = lambda _socket: None,
        protect_client: Protect = lambda _socket: None,
    ) -> None:
        self.numbers = numbers
        self._election = election
        self._heard_leader_at = time.monotonic()
        try:
            self._mirror = Mirror(Path(config.journal), syncs=config.journal_fsync != "none")
        except OSError as error:
            raise ConfigError(f"journal (--journal): {error}; use a folder that only this scheduler uses") from None
        self._router = bind(context, config.standby_address, protect_server) if config.standby_address else None
        self._links = [PeerLink(context, each, protect_client) for each in addresses(config.standby_of)]
        self._leader: PeerLink | None = None
        """Connection to the scheduler that leads."""
        self._acknowledges_each = config.journal_sync == "standby"
        self._receipt = Receipt()
        self._pause_s, self._again_at = 0.0, 0.0
        """Pause before the next copy, which doubles with each copy that fails, and its end."""
        self._copied_number = 0
        """Leader number of the journal that was copied."""
        self._acknowledged_at = self._said_hello_at = 0.0
        self._num_workers = 0
        self._has_stepped_down = False
        self._commanded_at: float | None = None
        self._stopping = False
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._said_complete = False

    def stop(self) -> None:
        """Make `run` return. May be called from a signal handler."""
        self._stopping = True
        os.eventfd_write(self._woken, 1)

    def run(self, pulse: Pulse) -> Succession | None:
        """Wait until this scheduler must lead; return None after `stop`."""
        log.info("standby: waiting", leader=[link.address for link in self._links])
        descriptors = (self._woken,) if self._election is None else (self._woken, self._election.woken)
        while not self._stopping:
            now = time.monotonic()
            pulse.beat()
            self._read(now)
            now = time.monotonic()
            number = self._elected(now) if self._election is not None else self._commanded(now)
            if number:
                log.warning(
                    "taking over", leader_number=number, has_whole_journal=self._mirror.is_complete,
                    leader_has_stepped_down=self._has_stepped_down,
                )  # fmt: skip
                return Succession(number, self._num_workers, self._mirror.found())
            self._tick(now)
            wait_readable(self._sockets, self._wait_s(time.monotonic()), descriptors)
        return None

    def close(self) -> None:
        """Close the sockets and the folder."""
        self._mirror.close()
        os.close(self._woken)
        for link in self._links:
            link.close()
        if self._router is not None:
            self._router.close(linger=0)

    @property
    def _sockets(self) -> "tuple[zmq.Socket[bytes], ...]":
        links = tuple(link.socket for link in self._links)
        return links if self._router is None else (self._router, *links)

    def _wait_s(self, now: float) -> float:
        """Return how long to wait for a message at most."""
        if self._commanded_at is None:
            return ACK_S
        return min(ACK_S, self._commanded_at + STEP_DOWN_S - now)

    def _elected(self, now: float) -> int:
        """Return the number under which this scheduler leads by its lease; 0 if it does not hold the lease."""
        assert self._election is not None
        # A standby that hears nothing, although a leader holds the lease, may have missed a part of its journal.
        silence_s = now - max(self._heard_leader_at, self._election.held_at)
        copied = self._copied_number if self._mirror.is_complete else 0
        stands = may_stand(self.numbers, copied, silence_s=silence_s, grace_s=self._election.grace_s)
        self._election.stand(self.numbers.highest if stands else None)
        return self._election.number

    def _commanded(self, now: float) -> int:
        """Return the number under which this scheduler leads by command; 0 if it must not lead yet."""
        if self._commanded_at is None or not self._may_lead(now):
            return 0
        return self.numbers.to_take_over(time.time_ns() // 1_000_000)

    def _begin_to_take_over(self, now: float) -> None:
        if self._election is None:
            self._commanded_at = now
        if self._leader is not None and self.numbers.highest:
            request = StepDown(leader_number=self.numbers.highest + 1, leads=False)
            if not self._leader.send(PeerMessage(step_down=request)):
                self._leader = None

    def _may_lead(self, now: float) -> bool:
        assert self._commanded_at is not None
        is_away = self._leader is None or self._has_stepped_down
        return is_away or now - self._commanded_at > STEP_DOWN_S

    def _read(self, now: float) -> None:
        if self._router is not None and is_readable(self._router):
            while (received := receive_peer(self._router)) is not None:
                self._handle(*received, now)
        for link in self._links:
            # A part takes time. With an old time, the leader would seem to have been silent meanwhile.
            end = now + _READING_S
            while is_readable(link.socket) and (now := time.monotonic()) < end:
                if (message := link.receive(now)) is not None:
                    self._follow(link, message, now)

    def _handle(self, peer: bytes, message: PeerMessage, now: float) -> None:
        assert self._router is not None
        obstacle = ""
        match message.WhichOneof("body"):
            # Without `leads`, the number is only a proposal. If another one is used, this standby would wait for ever.
            case "step_down" if message.step_down.leads:
                self.numbers = self.numbers.seen(message.step_down.leader_number)
            case "take_over" if self._commanded_at is None:
                self._begin_to_take_over(now)
        reply = SchedulerMessage(leader_number=self.numbers.highest, status=Status(obstacle=obstacle))
        send_to(self._router, peer, reply.SerializeToString())

    def _follow(self, link: PeerLink, message: SchedulerMessage, now: float) -> None:
        """Handle a message of another scheduler."""
        is_highest = message.leader_number >= self.numbers.highest
        self.numbers = self.numbers.seen(message.leader_number)
        match message.WhichOneof("body"):
            case "refused":
                log.error("standby refused by the leader", leader=link.address, reason=message.refused)
            case "stepped_down" if link is self._leader:
                self._has_stepped_down = True
            case "part" if message.leads and is_highest:
                self._heard_leader_at = now
                if self._leader is not link:
                    log.info("standby: follows a leader", leader=link.address, leader_number=message.leader_number)
                    self._leader = link
                if message.part.starts_over:
                    self._copied_number = message.leader_number
                self._write(link, message.part, now)
            case "status" if message.leads and link is self._leader and self._commanded_at is None:
                self._leader = None  # The leader does not know this standby any more.

    def _write(self, link: PeerLink, part: JournalPart, now: float) -> None:
        if not part.segment:
            self._num_workers = part.num_workers
        else:
            if not self._receipt.belongs(part.copy, starts_over=part.starts_over):
                return
            if self._receipt.is_broken:
                return
            try:
                if not self._receipt.follows(part.position):
                    raise GapError(f"segment {part.segment}: a part before {part.offset} is missing")
                self._mirror.write(part)
            except (GapError, OSError) as error:
                self._fail(error, now)
                return
            self._receipt.num_bytes += len(part.data)
            if self._mirror.is_complete and not self._said_complete:
                log.info("standby: has the whole journal", leader=link.address)
                self._pause_s = 0.0
            self._said_complete = self._mirror.is_complete
        if self._acknowledges_each or now - self._acknowledged_at >= ACK_S or (part.segment and not part.is_complete):
            self._acknowledged_at = now
            self._acknowledge(link)
        self._mirror.apply()

    def _fail(self, error: Exception, now: float) -> None:
        """Ask for another copy after a pause. Until then, the leader sends at most what it may send unacknowledged."""
        self._receipt.is_broken, self._copied_number, self._said_complete = True, 0, False
        if not self._pause_s:
            log.error("standby: the journal cannot be mirrored; trying again with longer pauses", error=str(error))
        self._pause_s = min(LONGEST_PAUSE_S, max(HELLO_S, 2 * self._pause_s))
        self._again_at = now + self._pause_s
        self._mirror.abandon()

    def _acknowledge(self, link: PeerLink) -> None:
        link.send(PeerMessage(ack=StandbyAck(num_bytes=self._receipt.num_bytes, copy=self._receipt.copy)))

    def _tick(self, now: float) -> None:
        for link in self._links:
            if not is_readable(link.socket) and link.renew(now) and link is self._leader:
                log.warning("standby: the leader is silent", leader=link.address)
                self._leader = None
        if self._leader is not None and now - self._acknowledged_at >= ACK_S:
            self._acknowledged_at = now
            self._acknowledge(self._leader)
        needs_copy = self._leader is None or (self._receipt.is_broken and now >= self._again_at)
        if needs_copy and self._commanded_at is None and now - self._said_hello_at >= HELLO_S:
            self._said_hello_at = now
            hello = StandbyHello(
                protocol_version=STANDBY_VERSIONS.oldest, newest_protocol_version=STANDBY_VERSIONS.newest
            )
            for link in self._links:
                link.send(PeerMessage(hello=hello))
