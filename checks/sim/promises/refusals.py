"""Requests that are refused because of their deadline."""

import math

from checks.sim.coverage import Limit
from checks.sim.faults import Fault
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.quotas import Quotas
from checks.sim.stream import Stream
from scheduler_svc.core.interface.records import EndReason

_HARMLESS = frozenset(
    (
        Fault.LATE_RESULT,
        Fault.DUPLICATE_RESULT,
        Fault.UNKNOWN_FAILURE,
        Fault.FAILED_ROW,
        Fault.SPOILT_ROW,
        Fault.UNKNOWN_STREAM,
        Fault.UNKNOWN_FRONTEND,
        Fault.CANCEL,
        Fault.STOP_STRING,
        Fault.SUBMITTED_TWICE,
        Fault.INVALID_REQUEST,
    )
)
"""Faults that interrupt no worker and hold up no request."""
_CAUTION = 3.0
"""Factor on a request's longest possible time, because forecasts have safety factors and durations are random."""


class RefusalsAreNeeded(Promise):
    """A request is refused by its deadline only if competing requests may make it miss the deadline.

    Requests that are held for their tenants' quotas do not compete. The check covers simulations in which the time that
    requests take is bounded: without faults that interrupt workers, and without readers that hold requests up. All
    competing requests may need the same worker.
    """

    def __init__(self, watched: Watched, quotas: Quotas) -> None:
        super().__init__(watched)
        self._quotas = quotas
        scenario = self.world.scenario
        faults, traffic = scenario.faults, scenario.traffic
        self._applies = (
            _HARMLESS.issuperset((*faults.of_steps, *faults.timed, *faults.of_requests))
            and not (traffic.credit_tokens or traffic.grammars)
            and scenario.config.batching.mode == "continuous"
            and not scenario.config.batching.delay_factor
        )
        self._most_tokens = 0
        """Tokens of the longest sequence so far."""

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        self._most_tokens = max(self._most_tokens, len(stream.demand.prompt) + stream.demand.max_tokens)
        if reason is not EndReason.DEADLINE or not self._applies or stream.deadline is None or not self.cluster.usable:
            return None
        left_s = stream.deadline - self.world.now
        if left_s <= 0 or not self.cluster.longest_step:
            return None
        self.seen(Limit.REFUSED)
        running = sum(other.epoch is not None for other in self.book.sequence)
        competing = sum(self._quotas.may_start(other) for other in self.book.waiting if other is not stream)
        rows = min(self.config.max_num_seqs, *(epoch.model.max_rows for epoch in self.cluster.usable))
        rounds = math.ceil((running + competing + 1) / rows)
        # Prompts may be computed token by token.
        longest_s = self.cluster.longest_step * self._most_tokens * (rounds + 1)
        if left_s <= _CAUTION * longest_s:
            return None
        return f"{left_s:.3f} s were left for {longest_s:.3f} s: {running} run and {competing} compete"
