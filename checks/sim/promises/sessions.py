"""Which requests wait for memory for a new session, and how long."""

from collections import Counter

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.stream import Stream, prefix_hashes
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.queueing.sessions import MIN_FIRST_TURNS, OPENING
from shared.request_spec import Pooling

_UNKNOWN_TOKENS = 24
"""Upper bound on the newest tokens of a sequence whose blocks the core may not have hashed, because steps in flight
sampled them.
"""


class OnlyNewSessionsWait(Promise):
    """New sessions wait for memory for at most `session_wait_s`, and only if requests have returned.

    The next turn of a session never waits: a request that extends the whole sequence of an earlier one, and is the
    first to do so. Sequences count only if the core has surely recognised them. A request that only begins with the
    same prompt may have continued the session in the meantime, as if a chat template had changed the answer.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._tables = watched.tables
        self._sequences: dict[int, bool] = {}
        """By hash of a sequence that has ended, whether its next turn is surely recognised."""
        self._tails: Counter[int] = Counter()
        """Number of sequences by the hash of the part up to a block boundary that may be their tail."""
        self._stems: dict[int, set[int]] = {}
        """Hashes of sequences by the hash of a part of their prompt, up to a block boundary, that may identify them."""
        self._largest = 0
        """The largest size of a block so far."""
        self._num_returns = 0
        self._next_turns: set[StreamName] = set()
        self._last_tick = self._regular_since = self.world.now

    def before(self, event: ev.Event) -> None:
        if not isinstance(event, ev.RequestArrived) or not self._sequences:
            return
        name = StreamName(event.frontend, event.stream)
        hashes = prefix_hashes(event.token_ids.tolist(), event.spec.cache_scope)
        earlier = next((each for each in reversed(hashes[:-1]) if each in self._sequences), None)
        with_stem: set[int] = set().union(*(self._stems.get(each, ()) for each in hashes)) - {earlier}
        self._num_returns += earlier is not None or bool(with_stem)
        self._sequences.update(dict.fromkeys(with_stem, False))
        if earlier is None:
            return
        stream = self.clients.live.get(name)
        is_plain = stream is not None and not (stream.demand.scored or stream.demand.pooling is not Pooling.NONE)
        if self._sequences[earlier] and is_plain and not event.again and not event.accepted:
            self._next_turns.add(name)
        self._sequences[earlier] = False

    def ended(self, stream: Stream) -> None:
        self._next_turns.discard(stream.name)
        if not self.config.holds_sessions or not stream.tokens or stream.demand.pooling is not Pooling.NONE:
            return
        num_prompt, num_tokens = len(stream.demand.prompt), stream.num_known
        hashes = prefix_hashes(stream.first_tokens(num_tokens), stream.demand.salt)
        is_known = stream.end in (EndReason.LENGTH, EndReason.STOP) and stream.placements == 1
        is_known &= not (stream.demand.scored or stream.row_failed or hashes[-1] in self._sequences)
        sizes = {epoch.model.block_size for epoch in self.cluster.epochs.values()}
        self._largest = max(self._largest, *sizes, 0)
        for stem in hashes[max(0, num_prompt - OPENING - self._largest) : max(0, num_prompt - OPENING)]:
            self._stems.setdefault(stem, set()).add(hashes[-1])
        if len(sizes) == 1:
            size = sizes.pop()
            tails = range((num_prompt // size + 1) * size, num_tokens, size)
            is_known &= len(tails) > 0 and tails[0] < num_tokens - _UNKNOWN_TOKENS
            is_known &= not any(self._tails[hashes[tail - 1]] for tail in tails)
            self._tails.update(hashes[tail - 1] for tail in tails)
        else:
            is_known = False
        self._sequences[hashes[-1]] = is_known

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if not isinstance(event, ev.TimePassed):
            return
        now, pace = self.world.now, self.world.scenario.pace
        patience = 2 * pace.tick + pace.turn
        if now - self._last_tick > patience:
            self._regular_since = now
        self._last_tick = now
        if not self.config.holds_sessions or not self.stats().waiting_by_reason["session"]:
            return
        self.seen(Limit.SESSION)
        held = next(queue.first for queue in self._tables().queues if queue.reason == "session")
        for each in held:
            name = StreamName(*each.key)
            if 2 * self._num_returns < MIN_FIRST_TURNS:
                what = f"it waits for memory for a session, and {self._num_returns} requests have returned"
                raise ViolationError("session.needless", what, name)
            if name in self._next_turns:
                raise ViolationError("session.under_way", "it continues a session and waits like a new one", name)
            if max(each.since, self._regular_since) < now - self.config.session_wait_s - patience:
                what = f"it waits for memory for a session since {each.since:.3f}"
                raise ViolationError("session.bound", what, name)
