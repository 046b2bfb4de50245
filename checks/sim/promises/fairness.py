"""How service is shared among backlogged groups.

The groups are the request classes, or without classes the tenants under `fair`. The simulator counts service
independently, from plans and delivered tokens. A group counts as waiting if, after each plan, at least one of its
requests waits only for room (see `eligible`).
"""

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.eligible import Eligibility
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.queueing.policies import FairPolicy

_MOST_RUNS = 4
"""Maximum number of tokens per row that were delivered and not yet counted, or are about to be delivered."""


class ServiceIsShared(Promise):
    """Between two groups that wait all the time, service per weight differs by at most the bound of VTC.

    With several workers a request may be assigned to one of them for a while, so only simulations with one worker are
    checked.
    """

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched)
        self._eligibility = eligibility
        self._applies = len(self.cluster.sites) == 1 and bool(self.config.classes or self.config.policy == "fair")
        self._weights = (
            {name: each.weight for name, each in self.config.classes.items()}
            if self.config.classes
            else self.config.tenant_weights
        )
        self._service: dict[str, float] = {}
        """Service by group, per weight."""
        self._counted: dict[Stream, int] = {}
        """Tokens of each stream that `_service` contains, or that an earlier core delivered."""
        self._has_begun: set[Stream] = set()
        """Streams that had tokens on arrival: their prompts are already counted."""
        self._ranges: dict[tuple[str, str], tuple[float, float]] = {}
        """For each pair of groups, while both wait: the minimum and maximum difference in service."""
        self._ceased: set[str] = set()
        """Groups that had no waiting request at some time since the last plan."""
        self._longest_prompt = self._longest_output = self._most_rows = self._most_tokens = 0

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if not self._applies or not isinstance(event, ev.RequestArrived):
            return
        stream = self.clients.live.get(StreamName(event.frontend, event.stream))
        if stream is not None and stream not in self._counted:
            self._counted[stream] = len(stream.tokens)
            if stream.tokens:
                self._has_begun.add(stream)
            self._longest_prompt = max(self._longest_prompt, len(stream.demand.prompt))
            self._longest_output = max(self._longest_output, stream.demand.max_tokens)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        if self._applies and stream.placements == 1 and stream not in self._has_begun:
            self._serve(stream, FairPolicy.INPUT_WEIGHT * (len(stream.demand.prompt) - admission.num_computed_tokens))

    def ended(self, stream: Stream) -> None:
        if not self._applies:
            return
        self._count_tokens(stream)
        self._counted.pop(stream, None)
        self._has_begun.discard(stream)
        group = self._group(stream)
        if not any(self._group(each) == group and each is not stream for each in self.book.waiting):
            self._ceased.add(group)

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not self._applies:
            return
        for stream in self._counted:
            self._count_tokens(stream)
        rows = min(self.config.max_num_seqs, epoch.model.max_rows)
        self._most_rows = max(self._most_rows, rows)
        self._most_tokens = max(self._most_tokens, epoch.model.num_usable * epoch.model.block_size)
        waiting = self._waiting(epoch)
        ranges: dict[tuple[str, str], tuple[float, float]] = {}
        for one in waiting:
            for other in waiting:
                if one < other:
                    self._compare(one, other, ranges)
        self._ranges = ranges
        self._ceased.clear()

    def _compare(self, one: str, other: str, ranges: dict[tuple[str, str], tuple[float, float]]) -> None:
        difference = self._service.get(one, 0.0) - self._service.get(other, 0.0)
        least, largest = difference, difference
        if not self._ceased & {one, other}:
            least, largest = self._ranges.get((one, other), (difference, difference))
            least, largest = min(least, difference), max(largest, difference)
        ranges[one, other] = least, largest
        bound = self._bound() / min(self._weight(one), self._weight(other))
        if largest - least > bound / 4:
            self.seen(Limit.SHARES)
        if largest - least > bound:
            what = f"service of {one!r} and {other!r} differs by {largest - least:.0f}, the bound is {bound:.0f}"
            raise ViolationError("fair.bound", what)

    def _bound(self) -> float:
        """Return the bound: twice a group's maximum service after its last admission, plus uncounted service."""
        output = FairPolicy.OUTPUT_WEIGHT
        by_memory = max(FairPolicy.INPUT_WEIGHT * self._longest_prompt, output * self._most_tokens)
        by_rows = FairPolicy.INPUT_WEIGHT * self._longest_prompt + output * self._most_rows * self._longest_output
        return 2 * min(by_memory, by_rows) + _MOST_RUNS * output * self._most_rows

    def _waiting(self, epoch: Epoch) -> list[str]:
        """Return the groups with at least one request that waits only for free rows or blocks."""
        found: dict[str, None] = {}
        memory = self._eligibility.memory(epoch)
        for stream in self.book.waiting:
            group = self._group(stream)
            if group not in found and self._eligibility.obstacle(stream, epoch, memory) is None:
                found[group] = None
        return list(found)

    def _count_tokens(self, stream: Stream) -> None:
        before = self._counted.get(stream)
        if before is not None and len(stream.tokens) > before:
            self._serve(stream, FairPolicy.OUTPUT_WEIGHT * (len(stream.tokens) - before))
            self._counted[stream] = len(stream.tokens)

    def _serve(self, stream: Stream, cost: float) -> None:
        group = self._group(stream)
        self._service[group] = self._service.get(group, 0.0) + cost / self._weight(group)

    def _group(self, stream: Stream) -> str:
        if not self.config.classes:
            return stream.demand.tenant
        return stream.demand.tenant if stream.demand.tenant in self.config.classes else ""

    def _weight(self, group: str) -> float:
        return self._weights.get(group, 1.0)
