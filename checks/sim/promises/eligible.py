"""Whether a waiting request could start on a worker now, as far as it is visible from outside.

The check is conservative: if the core may have a reason to delay the request, an obstacle is reported. So a request
without an obstacle must not be overtaken, and no worker may be idle while the request waits.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.blame import Suspects
from checks.sim.promises.quotas import Quotas
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.model_worker import Row
from records.rules.oracle import grammar_key
from scheduler_svc.core.queueing.backlog import MAX_ASSIGNED_S
from scheduler_svc.core.queueing.placement import MAX_ASSIGNED
from shared.request_spec import Pooling


class Obstacle(enum.Enum):
    """Reason why a request may have to wait."""

    CREDIT = "its reader has no credit"
    UNSETTLED = "a step in flight still names it"
    DRAINING = "the worker is drained"
    CONTEXT = "the worker's context is too short"
    MODEL = "the worker serves another model"
    SESSION = "it may begin a session, and new sessions wait for memory"
    GRAMMAR = "the worker has not compiled its grammar"
    QUOTA = "its tenant's quota"
    RIVALS = "others of its tenant may use up the quota"
    SUSPECT = "a request is tried alone, or may be"
    PREFIX = "another request computes its prefix"
    DISK = "its prefix is read from disk"
    MEMORY = "there may not be enough memory"


@dataclass(frozen=True, slots=True)
class Memory:
    """Free memory of a worker."""

    available: int
    """Number of blocks that can be allocated now."""
    reserve: int
    """Number of blocks that running requests may still need; 0 if all of them end."""
    promised: int
    """Number of blocks for the longest possible sequences of all running requests."""
    total: int


class Eligibility(Promise):
    """Examines requests and workers for other promises; guarantees nothing itself."""

    def __init__(self, watched: Watched, quotas: Quotas, suspects: Suspects) -> None:
        super().__init__(watched)
        self._quotas = quotas
        self._suspects = suspects
        self._holds_sessions = False
        """Whether new sessions wait for memory."""
        self._given_up = self._growth = 0
        """Blocks of requests that left their rows in the current plan, and further blocks that they could have taken.

        A request whose client reads nothing loses its row only after other requests were considered.
        """

    def asked(self, epoch: Epoch) -> None:
        self._holds_sessions = self.config.holds_sessions and self.stats().waiting_by_reason["session"] > 0
        self._given_up = self._growth = 0

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        size = epoch.model.block_size
        longest, present = _blocks(min(stream.longest, epoch.context) - 1, size), _blocks(stream.num_known, size)
        self._given_up += present
        self._growth += max(1, longest - present)

    def memory(self, epoch: Epoch, *, without: Stream | None = None, admitted: Sequence[Row] = ()) -> Memory:
        """Return a worker's memory after some of the current plan's admissions.

        Args:
            epoch: the worker.
            without: a new stream, whose blocks count as available.
            admitted: rows that the plan admits, which count although the book does not contain them yet.
        """
        stats = next(each for each in self.stats().workers if each.worker_id == epoch.worker_id)
        available = stats.blocks_free + stats.blocks_cached - self._given_up
        growth, promised = self._growth, 0
        size = epoch.model.block_size
        for row in epoch.model.rows.values():
            stream = self.clients.live.get(row.name)
            if stream is None or (stream.epoch is not epoch and row not in admitted):
                continue
            if stream is without:
                # The shared blocks may have been in use, or retired.
                available += len(row.blocks) - row.num_given // size
                continue
            longest = _blocks(min(stream.longest, epoch.context) - 1, size)
            in_windows = _most_window_blocks(epoch, longest)
            promised += longest + in_windows
            growth += max(0, longest - len(row.blocks)) + max(0, in_windows - row.num_window_blocks)
        return Memory(available, growth if epoch.in_flight else 0, promised, stats.blocks_total)

    def obstacle(
        self, stream: Stream, epoch: Epoch, memory: Memory, *, without: Stream | None = None
    ) -> Obstacle | None:
        """Return a waiting stream's obstacle; None if the stream could start instead of `without`."""
        demand = stream.demand
        if stream.starved:
            return Obstacle.CREDIT
        if self._holds_sessions and not stream.is_under_way:
            return Obstacle.SESSION
        # While the only worker drains, the requests that it preempted return to it.
        if epoch.draining and (stream.home is not epoch or len(self.cluster.sites) > 1):
            return Obstacle.DRAINING
        if not stream.may_run_on(epoch.model.fingerprint):
            return Obstacle.MODEL
        whole = len(demand.prompt) + demand.max_tokens
        if stream.num_known >= epoch.context or epoch.context < min(whole, self.cluster.longest()):
            return Obstacle.CONTEXT
        if demand.grammar and grammar_key(demand.grammar) not in epoch.compiled:
            return Obstacle.GRAMMAR
        if self._suspects.may_try_alone:
            return Obstacle.SUSPECT
        if not self._quotas.may_start(stream):
            return Obstacle.QUOTA
        if stream.is_unsettled:
            return Obstacle.UNSETTLED
        if self.may_lack_memory(stream, epoch, memory):
            return Obstacle.MEMORY
        return self.held_by(stream, epoch, without=without)

    def may_lack_memory(self, stream: Stream, epoch: Epoch, memory: Memory) -> bool:
        """Return whether there may not be enough memory for a waiting stream."""
        size = epoch.model.block_size
        needed = _blocks(stream.num_known, size)
        whole = len(stream.demand.prompt) + stream.demand.max_tokens
        longest = _blocks(min(whole, epoch.context) - 1, size)
        needed += epoch.model.max_window_blocks(max(needed, longest))
        if self.config.capacity == "guaranteed_no_evict":
            longest += _most_window_blocks(epoch, longest)
            short = memory.promised > 0 and memory.promised + longest > memory.total
        else:
            short = needed + memory.reserve > memory.available
        return short or needed > memory.available

    def has_quota(self, stream: Stream) -> bool:
        """Return whether a quota may delay some requests of the stream's tenant."""
        return self._quotas.has_any(stream)

    def held_by(self, stream: Stream, epoch: Epoch, *, without: Stream | None = None) -> Obstacle | None:
        """Return why a stream with credit may be held. No request overtakes it then."""
        if self._prefix_is_computed(stream, epoch, without):
            return Obstacle.PREFIX
        if epoch.jobs and self.cluster.disk_of(epoch).is_reading_for(epoch, stream.first_tokens(stream.num_known)):
            return Obstacle.DISK
        return Obstacle.RIVALS if self._quotas.may_be_last(stream) else None

    def shares_prefix_with(self, stream: Stream, rows: Sequence[Row], epoch: Epoch) -> bool:
        """Return whether a stream can share a block that one of the rows is computing."""
        first = self._shared_block(stream, epoch)
        return first is not None and any(row.tokens[: len(first)] == first for row in rows)

    def _prefix_is_computed(self, stream: Stream, epoch: Epoch, without: Stream | None) -> bool:
        """Return whether a started prompt may compute a block that the stream will share."""
        first = self._shared_block(stream, epoch)
        if first is None:
            return False
        own = None if without is None else without.name
        return any(
            row.computed < row.num_admitted and row.name != own and row.tokens[: len(first)] == first
            for row in epoch.model.rows.values()
        )

    def _shared_block(self, stream: Stream, epoch: Epoch) -> list[int] | None:
        """Return the tokens of the first block that a stream can share; None if there is none."""
        if not self.world.scenario.shares_prefixes or stream.demand.scored or stream.demand.pooling is Pooling.MEAN:
            return None
        first = stream.first_tokens(epoch.model.block_size)
        return first if len(first) == epoch.model.block_size else None


def assigned_s(promise: Promise) -> float:
    """Return how long a request may be assigned to workers that do not admit it, because they may be dead or lost."""
    if len(promise.cluster.epochs) == len(promise.cluster.sites) == 1:
        return 0.0
    pace = promise.world.scenario.pace
    return MAX_ASSIGNED * (MAX_ASSIGNED_S + 2 * pace.tick + pace.turn)


def _most_window_blocks(epoch: Epoch, longest: int) -> int:
    """Return the most window blocks of a sequence with two boundaries and a shared prefix."""
    return 3 * epoch.model.max_window_blocks(longest)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
