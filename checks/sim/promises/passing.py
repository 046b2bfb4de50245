"""How often a request is overtaken, under the policies whose keys change.

`AdmissionOrder` compares keys that never change. The key of `edf` changes when a target is missed, and `lpm` has no
key. Under `fair`, requests of one tenant have no key either. With several workers a request may be assigned to one of
them for a while, so only simulations with one worker are checked.
"""

from abc import ABC, abstractmethod

from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.eligible import Eligibility, Memory
from checks.sim.promises.prompts import PromptOrder
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import ViolationError
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.queueing.policies import EDF_SLACK_S, LongestPrefixQueue

_MAX_PASSED = LongestPrefixQueue.MAX_PASSED
_LATITUDE = 8
"""Number of admissions in one plan that may overtake a request preempted by the same plan."""


class _Passing(Promise, ABC):
    """Common part of the two promises."""

    policies: tuple[str, ...] = ()

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched)
        self._eligibility = eligibility
        self._prompts = PromptOrder(watched) if "edf" in self.policies else None
        used = {self.config.policy, *(each.policy for each in self.config.classes.values())}
        self._applies = len(self.cluster.sites) == 1 and not used.isdisjoint(self.policies)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        if self._applies and self.book.waiting and self.config.policy_of(stream.demand.tenant) in self.policies:
            rivals = [
                other
                for other in self.book.waiting
                if self.config.same_class(other.demand.tenant, stream.demand.tenant) and not other.starved
            ]
            if self._prompts is not None:
                rivals = [each for each in rivals if not self._prompts.by_short_part(each, stream, plan, epoch)]
            self._look(stream, rivals, epoch, self._eligibility.memory(epoch, without=stream))

    @abstractmethod
    def _look(self, stream: Stream, rivals: list[Stream], epoch: Epoch, memory: Memory) -> None:
        """Examine a stream that was admitted while others wait."""

    def _could_start(self, stream: Stream, epoch: Epoch, memory: Memory, without: Stream) -> bool:
        obstacle = self._eligibility.obstacle(stream, epoch, memory, without=without)
        return obstacle is None and not self._eligibility.has_quota(stream)


class TargetsGoFirst(_Passing):
    """Under `edf`, a request whose targets can still be met is admitted before those without such targets."""

    policies = ("edf",)

    def _look(self, stream: Stream, rivals: list[Stream], epoch: Epoch, memory: Memory) -> None:
        if _targets(stream):
            return
        latest = stream.arrival + EDF_SLACK_S
        for other in rivals:
            targets = _targets(other)
            # A request with at least one token has met its first-token target.
            is_new = not (other.placements or other.tokens)
            if not targets or not is_new or not self.world.now < self._latest_start(other) < min(targets) < latest:
                continue
            if self._could_start(other, epoch, memory, stream):
                raise ViolationError("order.target", f"{stream.name} is admitted first, and has no target", other.name)

    def _latest_start(self, stream: Stream) -> float:
        """Return the earliest possible value of the latest start that still meets the targets."""
        demand = stream.demand
        longest_step = self.cluster.longest_step
        prompt_s = len(demand.prompt) * longest_step
        starts = [min(_targets(stream)) - prompt_s]
        if stream.deadline is not None or stream.total_deadline is not None:
            starts.append(starts[0] - demand.max_tokens * longest_step)
        return min(starts)


class PassedOverSeldom(_Passing):
    """Under `lpm`, a bounded number of requests overtake the oldest request that could start.

    Under `fair`, this holds for the requests of each tenant.
    """

    policies = ("lpm", "fair")

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched, eligibility)
        self._passed: dict[Stream, int] = {}
        """By stream, the number of requests admitted before it since it became the oldest."""

    def _look(self, stream: Stream, rivals: list[Stream], epoch: Epoch, memory: Memory) -> None:
        if self.config.policy_of(stream.demand.tenant) == "fair":
            rivals = [other for other in rivals if other.demand.tenant == stream.demand.tenant]
        sequence = self.book.sequence
        oldest = min(rivals, key=sequence.__getitem__, default=None)
        if oldest is None or sequence[oldest] > sequence[stream]:
            return
        if not self._could_start(oldest, epoch, memory, stream):
            self._passed.pop(oldest, None)
            return
        count = self._passed[oldest] = self._passed.get(oldest, 0) + 1
        if count > _MAX_PASSED + _LATITUDE:
            raise ViolationError("order.passed", f"passed over {count} times, last by {stream.name}", oldest.name)

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        self._passed.pop(stream, None)

    def ended(self, stream: Stream) -> None:
        self._passed.pop(stream, None)


def _targets(stream: Stream) -> list[float]:
    """Return the targets of a stream's client."""
    wanted = (stream.deadline, stream.total_deadline, stream.ttft_deadline)
    return [time for time in wanted if time is not None]
