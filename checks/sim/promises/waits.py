"""How long a request waits for an event that may never come."""

from checks.sim.promises.base import Promise, Watched
from records.rules.oracle import grammar_key
from records.rules.violation import ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev


class WaitsAreBounded(Promise):
    """No request waits for a first worker, or for its reader, longer than the configuration says."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._last_tick = self._regular_since = self.world.now
        """Time since which time has advanced without long gaps, because the core measures waits in its own ticks."""

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if not isinstance(event, ev.TimePassed):
            return
        now, pace = self.world.now, self.world.scenario.pace
        # The core detects each of these at one tick and acts at the next.
        patience = 2 * pace.tick + pace.turn
        if now - self._last_tick > patience:
            self._regular_since = now
        self._last_tick = now
        if not self.cluster.usable:
            self._check_worker(now - self.config.worker_wait_s - patience)
        if self.config.stall_timeout_s:
            self._check_reader(now - self.config.stall_timeout_s - self.config.step_deadline_s - patience)

    def _check_worker(self, earliest: float) -> None:
        since_all = max(self.cluster.empty_since, self._regular_since)
        for stream in self.book.waiting:
            since = max(since_all, stream.arrival)
            if not stream.starved and not stream.returns_home and since < earliest:
                raise ViolationError("wait.worker", f"waits for a worker since {since:.3f}", stream.name)

    def _check_reader(self, earliest: float) -> None:
        for stream in self.clients.live.values():
            since = max(stream.last_move, self._regular_since)
            stalls = stream.starved and stream.known and (stream.epoch is None or stream.tokens)
            if stalls and since < earliest:
                raise ViolationError("wait.reader", f"its reader stalls since {since:.3f}", stream.name)


class UnusableGrammarsEnd(Promise):
    """If no worker can compile a grammar, every request that waits for this grammar ends."""

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if not isinstance(event, ev.GrammarReported) or not self.cluster.unusable:
            return
        for stream in self.clients.live.values():
            if stream.known and stream.epoch is None and grammar_key(stream.demand.grammar) == self.cluster.unusable:
                raise ViolationError("grammar.unusable", f"it goes on with {stream.demand.grammar!r}", stream.name)
