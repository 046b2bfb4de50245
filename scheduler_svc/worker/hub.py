"""Worker hub: all connected workers, by routing ID, and their heartbeats.

The monitor of a ROUTER socket does not identify a disconnected peer, but sending to this peer fails. The hub therefore
sends every worker at least a ping every `PING_INTERVAL_S`, so that a lost connection is detected in time. When a
process dies, its connection is closed only after the kernel has freed its memory. The hub therefore also polls the
state of local worker processes every `LOOK_INTERVAL_S`. While no request is live, both intervals are longer.
"""

import math
from dataclasses import dataclass
from functools import partial

import zmq

from scheduler_svc.core.interface import events as ev
from scheduler_svc.worker import link as worker_link
from shared.frames import PLAN_MAX_MESSAGE
from shared.logging import get_logger
from shared.process_watch import ProcessWatch
from shared.sockets import PLAN_HEARTBEAT, Protect, SendOutcome, bind_router, send_to

PING_INTERVAL_S = 0.05
LOOK_INTERVAL_S = 0.02

log = get_logger()


@dataclass(slots=True)
class _Worker:
    worker_id: str
    last_sent: float
    epoch: int = 0
    """Epoch of the worker; 0 before Welcome."""
    ping: bytes = b""
    """Encoded ping of the epoch; empty before Welcome."""
    watch: ProcessWatch | None = None
    """Watch of the worker's process; None if it runs on another machine."""
    was_dying: bool = False
    """Whether the process was dying at the last poll."""


class WorkerHub:
    """ROUTER socket that workers connect to, and the state of each worker."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, protect: Protect = lambda _socket: None
    ):
        self.socket = bind_router(
            context, address, max_message=PLAN_MAX_MESSAGE, heartbeat=PLAN_HEARTBEAT, protect=protect
        )
        self._workers: dict[ev.Peer, _Worker] = {}
        self._log_level = ""

    def add(self, peer: ev.Peer, worker_id: str, now: float, *, process: str = "") -> None:
        """Add a worker that sent Hello."""
        self._close_watch(peer)
        self._workers[peer] = _Worker(worker_id, now, watch=ProcessWatch.open(process) if process else None)

    def welcomed(self, peer: ev.Peer, epoch: int) -> None:
        """Note that the worker was welcomed with a new epoch."""
        worker = self._workers[peer]
        worker.epoch, worker.ping = epoch, worker_link.encode_ping(epoch, self._log_level)
        log.info("worker joined", worker=worker.worker_id, epoch=f"{epoch:016x}")

    def worker_id(self, peer: ev.Peer) -> str | None:
        """Return the worker's name; None if the peer is unknown."""
        worker = self._workers.get(peer)
        return worker.worker_id if worker is not None else None

    def __len__(self) -> int:
        return len(self._workers)

    def knows(self, worker_id: str) -> bool:
        """Return whether a worker of this name is connected."""
        return any(worker.worker_id == worker_id for worker in self._workers.values())

    def forget(self, peer: ev.Peer, reason: str, *, orderly: bool = False) -> None:
        """Drop a worker. If it has sent Goodbye (`orderly`), the log level is lower."""
        self._close_watch(peer)
        worker = self._workers.pop(peer, None)
        if worker is not None:
            write = partial(log.info, "worker left") if orderly else partial(log.warning, "worker lost")
            write(worker=worker.worker_id, epoch=f"{worker.epoch:016x}", reason=reason)

    def send(self, peer: ev.Peer, frame: bytes, now: float) -> str | None:
        """Send a frame that must arrive; return the reason if the worker is lost, else None."""
        outcome = send_to(self.socket, peer, frame)
        if outcome is SendOutcome.SENT:
            worker = self._workers.get(peer)
            if worker is not None:
                worker.last_sent = now
            return None
        return (
            "its connection was closed" if outcome is SendOutcome.GONE else "it does not read: its send queue is full"
        )

    def try_send(self, peer: ev.Peer, frame: bytes) -> None:
        """Send a frame to a peer that may be disconnected; ignore failures."""
        send_to(self.socket, peer, frame)

    def dying(self) -> list[ev.Peer]:
        """Poll the worker processes; return the workers whose process was also dying at the previous poll.

        At this time, all messages that such a process sent before it died have arrived.
        """
        found = []
        for peer, worker in self._workers.items():
            if worker.watch is not None and worker.watch.is_dying():
                if worker.was_dying:
                    found.append(peer)
                worker.was_dying = True
        return found

    def close(self) -> None:
        """Close the socket and the process watches."""
        for peer in self._workers:
            self._close_watch(peer)
        self.socket.close()

    def set_log_level(self, level: str) -> None:
        """Send the log level to every worker with the next ping, which is due at once."""
        self._log_level = level
        for worker in self._workers.values():
            if worker.epoch:
                worker.ping = worker_link.encode_ping(worker.epoch, level)
                worker.last_sent = -math.inf

    def ping(self, now: float) -> list[ev.Peer]:
        """Ping the workers for which a ping is due; return the workers whose connection is closed."""
        gone = []
        for peer, worker in self._workers.items():
            if worker.ping and now - worker.last_sent >= PING_INTERVAL_S:
                worker.last_sent = now
                # A full queue does not prove that the worker is dead, because a worker does not read during a long
                # step.
                if send_to(self.socket, peer, worker.ping) is SendOutcome.GONE:
                    gone.append(peer)
        return gone

    def _close_watch(self, peer: ev.Peer) -> None:
        worker = self._workers.get(peer)
        if worker is not None and worker.watch is not None:
            worker.watch.close()
