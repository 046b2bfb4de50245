"""What is kept of requests whose clients may come back: tokens and how they ended, bounded in time and bytes.

A request with an *identity* leaves its log here when it ends: for good, or because its client is gone. Nothing is
computed for a client that is not there; whoever resumes submits the request again with the tokens of the log, and the
prefix cache and the noise, which depends on the position alone, make it go on as if nothing had happened. The log stays
until it is older than `keep_s`, until a newer one takes its place, or until the memory for logs is used up; then the
oldest one goes.
"""

from collections import OrderedDict

from scheduler_svc.core.records import Log


class KeptLogs:
    """The logs of one core, oldest first."""

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
        """The log of a request."""
        entry = self._logs.get(identity)
        return None if entry is None else entry[1]

    def put(self, identity: bytes, log: Log, now: float) -> list[bytes]:
        """Keeps a log, in place of an older one of the same request; returns whose logs had to go for it."""
        self.drop(identity)
        self._logs[identity] = (now, log)
        self.num_bytes += log.size
        gone = []
        while self.num_bytes > self._max_bytes:
            gone.append(next(iter(self._logs)))
            self.drop(gone[-1])
        return gone

    def drop(self, identity: bytes) -> bool:
        """Forgets a log; whether there was one."""
        entry = self._logs.pop(identity, None)
        if entry is None:
            return False
        self.num_bytes -= entry[1].size
        return True

    def time_passed(self, now: float) -> list[bytes]:
        """Forgets what is too old; returns whose logs that were."""
        gone = []
        while self._logs:
            identity, (since, _) = next(iter(self._logs.items()))
            if now - since <= self._keep_s:
                break
            self.drop(identity)
            gone.append(identity)
        return gone
