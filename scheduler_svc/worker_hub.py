"""All connected workers: who is known under which routing id, and that each hears something often enough.

A ROUTER's monitor does not say which peer left; a send to it does. So something goes to every worker at least every
`PING_INTERVAL_S`, which bounds how long the end of a connection stays unnoticed. A process of this machine is looked at
as well, every `LOOK_INTERVAL_S`: it keeps its connection until the kernel has taken its memory back.
"""

import math
from dataclasses import dataclass
from functools import partial

import zmq

from scheduler_svc import worker_link
from scheduler_svc.core import events as ev
from shared.logging import get_logger
from shared.process_watch import ProcessWatch
from shared.sockets import PLAN_HEARTBEAT, PLAN_MAX_MESSAGE, Protect, SendOutcome, bind_router, send_to

PING_INTERVAL_S = 0.05
LOOK_INTERVAL_S = 0.02

log = get_logger()


@dataclass(slots=True)
class _Worker:
    worker_id: str
    last_sent: float
    epoch: int = 0
    """0 before it was welcomed."""
    ping: bytes = b""
    """The ping of its epoch; empty before it was welcomed."""
    watch: ProcessWatch | None = None
    """Of a process on this machine."""
    was_dying: bool = False
    """Whether its process was dying at the last look."""


class WorkerHub:
    """The ROUTER that workers connect to."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, protect: Protect = lambda _socket: None
    ):
        self.socket = bind_router(
            context, address, max_message=PLAN_MAX_MESSAGE, heartbeat=PLAN_HEARTBEAT, protect=protect
        )
        self._workers: dict[ev.Peer, _Worker] = {}
        self._log_level = ""

    def add(self, peer: ev.Peer, worker_id: str, now: float, *, process: str = "") -> None:
        """A worker said hello."""
        self._close_watch(peer)
        self._workers[peer] = _Worker(worker_id, now, watch=ProcessWatch.open(process) if process else None)

    def welcomed(self, peer: ev.Peer, epoch: int) -> None:
        """The worker's epoch begins."""
        worker = self._workers[peer]
        worker.epoch, worker.ping = epoch, worker_link.encode_ping(epoch, self._log_level)
        log.info("worker joined", worker=worker.worker_id, epoch=f"{epoch:016x}")

    def worker_id(self, peer: ev.Peer) -> str | None:
        """The worker's name, or None for a stranger."""
        worker = self._workers.get(peer)
        return worker.worker_id if worker is not None else None

    def knows(self, worker_id: str) -> bool:
        """Whether a worker of this name is connected."""
        return any(worker.worker_id == worker_id for worker in self._workers.values())

    def forget(self, peer: ev.Peer, reason: str, *, orderly: bool = False) -> None:
        """Drops a worker, which is nothing to worry about when it left of its own will."""
        self._close_watch(peer)
        worker = self._workers.pop(peer, None)
        if worker is not None:
            tell = partial(log.info, "worker left") if orderly else partial(log.warning, "worker lost")
            tell(worker=worker.worker_id, epoch=f"{worker.epoch:016x}", reason=reason)

    def send(self, peer: ev.Peer, frame: bytes, now: float) -> str | None:
        """Sends a frame that must arrive; returns why the worker is lost, if it is."""
        outcome = send_to(self.socket, peer, frame)
        if outcome is SendOutcome.SENT:
            worker = self._workers.get(peer)
            if worker is not None:
                worker.last_sent = now
            return None
        return "its connection is gone" if outcome is SendOutcome.GONE else "it takes no more frames"

    def send_carelessly(self, peer: ev.Peer, frame: bytes) -> None:
        """Sends a frame to a peer that may be gone."""
        send_to(self.socket, peer, frame)

    def dying(self) -> list[ev.Peer]:
        """The workers whose processes were dying at the last look already: what they said before that has arrived."""
        found = []
        for peer, worker in self._workers.items():
            if worker.watch is not None and worker.watch.is_dying():
                if worker.was_dying:
                    found.append(peer)
                worker.was_dying = True
        return found

    def close(self) -> None:
        """Closes the socket, and forgets everybody."""
        for peer in self._workers:
            self._close_watch(peer)
        self.socket.close()

    def set_log_level(self, level: str) -> None:
        """Every worker is told with its next ping, which is due at once."""
        self._log_level = level
        for worker in self._workers.values():
            if worker.epoch:
                worker.ping = worker_link.encode_ping(worker.epoch, level)
                worker.last_sent = -math.inf

    def ping(self, now: float) -> list[ev.Peer]:
        """Pings who has heard nothing for a while; returns the workers that turned out to be gone."""
        gone = []
        for peer, worker in self._workers.items():
            if worker.ping and now - worker.last_sent >= PING_INTERVAL_S:
                worker.last_sent = now
                # A full queue is no death: a worker in a long step reads nothing.
                if send_to(self.socket, peer, worker.ping) is SendOutcome.GONE:
                    gone.append(peer)
        return gone

    def _close_watch(self, peer: ev.Peer) -> None:
        worker = self._workers.get(peer)
        if worker is not None and worker.watch is not None:
            worker.watch.close()
