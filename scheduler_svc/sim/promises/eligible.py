"""Whether a waiting request could start on a worker now, as far as that can be told from outside.

"Could" is meant strictly: where the core may have a reason of its own to let the request wait, the answer names an
obstacle. So a request without an obstacle must not be passed by, and a worker must not stay idle beside it.
"""

import enum
from dataclasses import dataclass

from scheduler_svc.core.interface.records import Pooling
from scheduler_svc.core.queueing.backlog import MAX_ASSIGNED_S
from scheduler_svc.core.queueing.placement import MAX_ASSIGNED
from scheduler_svc.sim.oracle import grammar_key
from scheduler_svc.sim.promises.base import Promise, Watched
from scheduler_svc.sim.promises.blame import Suspects
from scheduler_svc.sim.promises.quotas import Quotas
from scheduler_svc.sim.sites import Epoch
from scheduler_svc.sim.stream import Stream


class Obstacle(enum.Enum):
    """Why a request may have to wait."""

    CREDIT = "its reader has no credit"
    UNSETTLED = "a step in flight still names it"
    DRAINING = "the worker is drained"
    CONTEXT = "the worker's context is too short"
    GRAMMAR = "the worker has not compiled its grammar"
    QUOTA = "its tenant's quota"
    RIVALS = "others of its tenant may use up the quota"
    SUSPECT = "a request is tried alone, or may be"
    PREFIX = "another request computes its prefix"
    MEMORY = "there may not be enough memory"


@dataclass(frozen=True, slots=True)
class Memory:
    """What a worker has left."""

    available: int
    """Blocks that can be taken now."""
    reserve: int
    """Blocks that the requests which run may need until they are complete; 0 where none of them goes on."""
    promised: int
    """Blocks of the longest possible sequences of all who run."""
    total: int


class Eligibility(Promise):
    """Looks at requests and workers for other promises; guarantees nothing itself."""

    def __init__(self, watched: Watched, quotas: Quotas, suspects: Suspects) -> None:
        super().__init__(watched)
        self._quotas = quotas
        self._suspects = suspects

    def memory(self, epoch: Epoch, *, without: Stream | None = None) -> Memory:
        """The memory of a worker; `without` a new one whose blocks count as available."""
        stats = next(each for each in self.stats().workers if each.worker_id == epoch.worker_id)
        available = stats.blocks_free + stats.blocks_cached
        growth = promised = 0
        size = epoch.model.block_size
        for row in epoch.model.rows.values():
            stream = self.clients.live.get(row.name)
            if stream is None or stream.epoch is not epoch:
                continue
            if stream is without:
                # What it shares may have been in use, or waited for an answer.
                available += len(row.blocks) - row.num_given // size
                continue
            longest = _blocks(min(stream.longest, epoch.context) - 1, size)
            promised += longest
            growth += max(0, longest - len(row.blocks))
        return Memory(available, growth if epoch.in_flight else 0, promised, stats.blocks_total)

    def obstacle(
        self, stream: Stream, epoch: Epoch, memory: Memory, *, without: Stream | None = None
    ) -> Obstacle | None:
        """Why a stream that waits may have to wait on; None: it could start, if `without` had not."""
        demand = stream.demand
        if stream.starved:
            return Obstacle.CREDIT
        if epoch.draining:
            return Obstacle.DRAINING
        if stream.num_known >= epoch.context:
            return Obstacle.CONTEXT
        if demand.grammar and grammar_key(demand.grammar) not in epoch.compiled:
            return Obstacle.GRAMMAR
        if self._suspects.may_try_alone:
            return Obstacle.SUSPECT
        if not self._quotas.may_start(stream):
            return Obstacle.QUOTA
        if stream.is_unsettled:
            return Obstacle.UNSETTLED
        size = epoch.model.block_size
        needed = _blocks(stream.num_known, size)
        if self.config.capacity == "guaranteed_no_evict":
            longest = _blocks(min(stream.longest, epoch.context) - 1, size)
            short = memory.promised > 0 and memory.promised + longest > memory.total
        else:
            short = needed + memory.reserve > memory.available
        if short or needed > memory.available:
            return Obstacle.MEMORY
        return self.held_by(stream, epoch, without=without)

    def has_quota(self, stream: Stream) -> bool:
        """Whether the stream's tenant may not run all that it wants."""
        return self._quotas.has_any(stream)

    def held_by(self, stream: Stream, epoch: Epoch, *, without: Stream | None = None) -> Obstacle | None:
        """Why a stream that has credit may be held apart, whatever memory there is: it is overtaken by nobody then."""
        if self._prefix_is_computed(stream, epoch, without):
            return Obstacle.PREFIX
        return Obstacle.RIVALS if self._quotas.may_be_last(stream) else None

    def _prefix_is_computed(self, stream: Stream, epoch: Epoch, without: Stream | None) -> bool:
        """Whether a prompt under way may be computing a block that the stream will share."""
        if self.config.prefix_cache == "off" or stream.demand.scored or stream.demand.pooling is Pooling.MEAN:
            return False
        size = epoch.model.block_size
        first = stream.first_tokens(size)
        if len(first) < size:
            return False
        own = None if without is None else without.name
        return any(
            row.computed < row.num_admitted and row.name != own and row.tokens[:size] == first
            for row in epoch.model.rows.values()
        )


def assigned_s(promise: Promise) -> float:
    """How long a request may be assigned to workers that do not take it; one of them may be dead, or lost by now."""
    if len(promise.cluster.epochs) == len(promise.cluster.sites) == 1:
        return 0.0
    pace = promise.world.scenario.pace
    return MAX_ASSIGNED * (MAX_ASSIGNED_S + 2 * pace.tick + pace.turn)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
