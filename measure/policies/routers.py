"""Routers: how a load balancer distributes jobs over independent schedulers."""

import hashlib
from abc import ABC, abstractmethod

from measure.policies.jobs import Job

_PREFIX_TOKENS = 4096
"""Number of leading prompt tokens that prefix-hash uses."""


class Router(ABC):
    """Chooses a worker for each job."""

    def __init__(self, num_workers: int) -> None:
        self._num_live = [0] * num_workers

    def choose(self, job: Job) -> int:
        """Return the worker for a job, and count the job as live there."""
        worker = self._choose(job)
        self._num_live[worker] += 1
        return worker

    def ended(self, worker: int) -> None:
        """Count a job on a worker as ended."""
        self._num_live[worker] -= 1

    @abstractmethod
    def _choose(self, job: Job) -> int:
        """Return the worker of a job."""


class RoundRobin(Router):
    """Uses the workers in turn."""

    _next = -1

    def _choose(self, job: Job) -> int:
        self._next = (self._next + 1) % len(self._num_live)
        return self._next


class LeastLoad(Router):
    """Chooses the worker with the fewest live jobs."""

    def _choose(self, job: Job) -> int:
        return min(range(len(self._num_live)), key=self._num_live.__getitem__)


class PrefixHash(Router):
    """Chooses a worker by a hash over the prompt's first pieces, regardless of load."""

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
