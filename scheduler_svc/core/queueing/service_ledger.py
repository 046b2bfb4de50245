"""Service ledger: the service that each group has received, and the set of backlogged groups.

These are the virtual token counters of VTC (Sheng et al., OSDI 2024). A group is *backlogged* while it has waiting
requests. When a group becomes backlogged again, its service is raised to that of the least served backlogged group, or,
if there is none, of the group that was backlogged last. Idle time therefore earns no credit. All queues of a policy
share one ledger, so a group has one service for all of its requests.
"""

import heapq
from collections.abc import Mapping


class ServiceLedger:
    """Service per weight of all backlogged groups, and of the most served idle groups."""

    MAX_IDLE = 10_000
    """Maximum number of idle groups whose service is stored; beyond that, the least served group is dropped."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Start without groups; `weights` are their shares, 1 for other groups."""
        self._weights = weights
        self._service: dict[str, float] = {}
        self._backlog: dict[str, int] = {}
        """Waiting requests of each backlogged group."""
        self._backlogged = _LeastServed()
        self._idle = _LeastServed()
        self._last = ""
        """The group that was backlogged last."""
        self._last_service = 0.0
        """The service of that group when its backlog ended."""

    def __len__(self) -> int:
        """Return the number of groups whose service is stored."""
        return len(self._service)

    def service(self, group: str) -> float:
        """Return the group's service in tokens per weight."""
        return self._service.get(group, 0.0)

    def enter(self, group: str) -> None:
        """Count one more waiting request of the group."""
        waiting = self._backlog.get(group, 0)
        if not waiting:
            lifted = self._service[group] = max(self.service(group), self._floor())
            self._idle.discard(group)
            self._backlogged.add(group, lifted)
        self._backlog[group] = waiting + 1

    def leave(self, group: str) -> None:
        """Subtract one waiting request of the group."""
        self._backlog[group] -= 1
        if not self._backlog[group]:
            del self._backlog[group]
            self._backlogged.discard(group)
            self._last, self._last_service = group, self._service[group]
            self._remember_idle(group)

    def serve(self, group: str, cost: float) -> None:
        """Add tokens of cost `cost` to the group's service."""
        self._service[group] = self.service(group) + cost / self._weights.get(group, 1.0)
        if group not in self._backlog:
            self._remember_idle(group)

    def _floor(self) -> float:
        """Return the service to which a group that becomes backlogged now is lifted."""
        least = self._backlogged.least(self._service)
        if least is not None:
            return self._service[least]
        # The group's running requests still get service, unless the group was dropped.
        return max(self._last_service, self.service(self._last))

    def _remember_idle(self, group: str) -> None:
        """Store the service of an idle group, and drop the least served idle group if there are too many."""
        self._idle.add(group, self._service[group])
        while len(self._idle) > self.MAX_IDLE and (least := self._idle.least(self._service)) is not None:
            self._idle.discard(least)
            del self._service[least]


class _LeastServed:
    """A set of groups with fast access to the least served group.

    Service only grows, so a heap entry is a lower bound. The entry is corrected when it reaches the top of the heap.
    Entries for groups outside the set are dropped at the top, or when they make up more than half of the heap.
    """

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._listed: set[str] = set()
        """Groups with an entry in the heap."""
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._members)

    def add(self, group: str, service: float) -> None:
        self._members.add(group)
        if group not in self._listed:
            self._listed.add(group)
            heapq.heappush(self._heap, (service, group))

    def discard(self, group: str) -> None:
        self._members.discard(group)
        if len(self._heap) > 64 + 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
            self._listed = {group for _, group in self._heap}

    def least(self, service: Mapping[str, float]) -> str | None:
        heap = self._heap
        while heap:
            bound, group = heap[0]
            if group not in self._members:
                heapq.heappop(heap)
                self._listed.discard(group)
            elif bound != service[group]:
                heapq.heapreplace(heap, (service[group], group))
            else:
                return group
        return None
