"""Retained logs of requests whose clients may reconnect: tokens and ends, bounded in time and bytes.

A request with an *identity* leaves its log here when it ends, or when its client is lost. Nothing is computed for an
absent client. When the client resumes, the request is submitted again with the log's tokens. Because the random noise
depends only on seed, choice and position, the request continues as if it had not been interrupted. The prefix cache
saves most of the computation.

A log stays until one of these events:

* it is older than `keep_s`;
* a newer log of the same request replaces it;
* the memory for logs is full, and the log is the oldest.
"""

from collections import OrderedDict

from scheduler_svc.core.interface.records import Log


class KeptLogs:
    """The retained logs of one core, oldest first."""

    def __init__(self, keep_s: float, max_bytes: int) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._logs: OrderedDict[bytes, tuple[float, Log]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._logs)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._logs

    def get(self, identity: bytes) -> Log | None:
        """Return the log of a request, or None."""
        entry = self._logs.get(identity)
        return None if entry is None else entry[1]

    def put(self, identity: bytes, log: Log, now: float) -> list[bytes]:
        """Store a log, replacing an older one of the same request.

        Returns:
            the identities whose logs were dropped to make room.
        """
        self.drop(identity)
        self._logs[identity] = (now, log)
        self.num_bytes += log.size
        gone = []
        while self.num_bytes > self._max_bytes:
            gone.append(next(iter(self._logs)))
            self.drop(gone[-1])
        return gone

    def drop(self, identity: bytes) -> bool:
        """Drop a log; return whether there was one."""
        entry = self._logs.pop(identity, None)
        if entry is None:
            return False
        self.num_bytes -= entry[1].size
        return True

    def time_passed(self, now: float) -> list[bytes]:
        """Drop logs that are too old; return their identities."""
        gone = []
        while self._logs:
            identity, (since, _) = next(iter(self._logs.items()))
            if now - since <= self._keep_s:
                break
            self.drop(identity)
            gone.append(identity)
        return gone
