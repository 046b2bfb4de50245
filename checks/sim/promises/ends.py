"""Valid reasons for the end of a request."""

from checks.sim.promises.base import Promise, Watched
from checks.sim.stream import Stream
from checks.sim.traffic import UNUSABLE
from records.rules.oracle import grammar_key
from scheduler_svc.core.interface.records import EndReason


class EndsAreJustified(Promise):
    """The history of client, workers and clock justifies each request's end reason.

    A request counts as started if a core has accepted it, or if it has tokens or had a row. It ends only when it is
    complete, when its client disconnects, at its deadline, because of its own fault, or when no worker can serve it.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self.shutting_down = False

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        match reason:
            case EndReason.CANCELLED:
                return None if stream.cancel_sent else "no client cancelled it"
            case EndReason.DEADLINE:
                return self._deadline(stream)
            case EndReason.INVALID:
                return self._invalid(stream)
            case EndReason.LENGTH:
                return self._length(stream)
            case EndReason.NO_WORKER:
                return self._no_worker(stream)
            case EndReason.STALLED:
                patience = self.config.stall_timeout_s
                if not patience or not stream.starved or self.world.now - stream.last_move < patience:
                    return "its reader was not stalled"
            case EndReason.SHUTDOWN:
                return None if self.shutting_down else "no shutdown was requested"
        return None

    def _deadline(self, stream: Stream) -> str | None:
        if stream.deadline is None:
            return "it has no deadline"
        early = self.world.now < stream.deadline
        return "it is under way and its time was not up" if early and stream.is_under_way else None

    def _invalid(self, stream: Stream) -> str | None:
        if stream.demand.grammar == UNUSABLE or not stream.demand.valid:
            return None
        return "it is valid" if stream.is_under_way or stream.num_known < self.cluster.longest() else None

    @staticmethod
    def _length(stream: Stream) -> str | None:
        if len(stream.tokens) >= stream.demand.max_tokens:
            return None
        return f"{len(stream.tokens)} of {stream.demand.max_tokens} tokens"

    def _no_worker(self, stream: Stream) -> str | None:
        patience = self.config.worker_wait_s
        if stream.demand.grammar and self._has_no_grammar(stream):
            return None
        if stream.returns_home:
            return "its draining worker is there"
        if self.world.now - stream.arrival < patience:
            return f"it waits since {stream.arrival:.3f}"
        if self.cluster.longest_since(self.world.now - patience, stream.demand.model) > stream.num_known:
            return "a worker was there that takes sequences of its length"
        return None

    def _has_no_grammar(self, stream: Stream) -> bool:
        """Return whether every worker that is long enough for the stream failed to compile its grammar."""
        key = grammar_key(stream.demand.grammar)
        whole = len(stream.demand.prompt) + stream.demand.max_tokens
        least = max(stream.num_known + 1, min(whole, self.cluster.longest()))
        able = [key not in epoch.cannot for epoch in self.cluster.usable if epoch.context >= least]
        return bool(able) and not any(able)
