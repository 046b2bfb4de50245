"""The number of waiting requests that the core looks at.

Time would differ from run to run. So the check counts how often the core takes a request out of its queues.
"""

from collections.abc import Callable
from typing import Any

from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.planning.batch_selection import MAX_OVERTAKING_TRIES

_PER_PLAN = 2 * MAX_OVERTAKING_TRIES + 4
"""Fixed allowance per plan: requests that lack memory, suspects, the next urgent one, and the last one examined."""
_PER_EVENT = 4
"""Allowance per event: requests that are examined again because they were held, released, late or assigned."""
_ALWAYS = 64


class WorkPerPlan(Promise):
    """The planner examines the requests that it admits and a few others, however many wait.

    A held request is not examined before an event that concerns it. The number of examined requests is therefore
    bounded by a constant per plan plus the numbers of admissions and events.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._allowed = _ALWAYS
        self._taken = 0
        backlog = watched.core._requests.backlog
        for name in ("take", "take_assigned", "take_suspect"):
            setattr(backlog, name, self._counting(getattr(backlog, name)))

    def _counting(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            request = take(*arguments)
            self._taken += request is not None
            return request

        return counted

    def asked(self, epoch: Epoch) -> None:
        # The unused part of a plan's allowance does not carry over to the next plan.
        most = self._taken + _ALWAYS + _PER_EVENT * len(self.clients.live)
        self._allowed = min(self._allowed, most) + _PER_PLAN

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        self._allowed += 1

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if self._taken > self._allowed:
            what = f"{self._taken - self._allowed} more requests were examined than plans and events justify"
            raise ViolationError("work.effort", what)
        self._allowed += _PER_EVENT
