"""Routers: how a load balancer distributes jobs over schedulers that know nothing of each other."""

import hashlib
from abc import ABC, abstractmethod

from measure.policies.jobs import Job

_PREFIX_TOKENS = 4096
"""Tokens at the beginning of a prompt that prefix-hash looks at."""


class Router(ABC):
    """Chooses a worker for each job."""

    def __init__(self, num_workers: int) -> None:
        self._num_live = [0] * num_workers

    def choose(self, job: Job) -> int:
        """Return the worker of a job, which counts as live there."""
        worker = self._choose(job)
        self._num_live[worker] += 1
        return worker

    def ended(self, worker: int) -> None:
        """Count a job of a worker as ended."""
        self._num_live[worker] -= 1

    @abstractmethod
    def _choose(self, job: Job) -> int:
        """Return the worker of a job."""


class RoundRobin(Router):
    """One worker after the other."""

    _next = -1

    def _choose(self, job: Job) -> int:
        self._next = (self._next + 1) % len(self._num_live)
        return self._next


class LeastLoad(Router):
    """The worker with the fewest live jobs."""

    def _choose(self, job: Job) -> int:
        return min(range(len(self._num_live)), key=self._num_live.__getitem__)


class PrefixHash(Router):
    """The worker that a hash of the first pieces of the prompt names, whatever its load."""

    def _choose(self, job: Job) -> int:
        seen = 0
        digest = hashlib.sha256()
        for piece in job.prompt:
            digest.update(repr(tuple(piece)).encode())
            seen += piece.length
            if seen >= _PREFIX_TOKENS:
                break
        return int.from_bytes(digest.digest()[:8], "big") % len(self._num_live)


ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "prefix-hash": PrefixHash,
}
