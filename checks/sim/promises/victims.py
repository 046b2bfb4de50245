"""Which running requests are preempted, and when they may run again."""

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.drains import is_in_row
from checks.sim.promises.eligible import Eligibility, Obstacle
from checks.sim.promises.keys import PolicyKeys
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.interface.records import NoteKind
from scheduler_svc.core.planning.batch_selection import ROWS_PER_ROW

_MOST_NOTES = 64
"""Maximum number of lines in a story. A longer one may not show the newest preemption."""


class VictimsRankLast(Promise):
    """A request is preempted only for a request that ranks ahead of it, and does not run again before that request.

    * For a waiting urgent request, the victim is in its class and ranks behind it by more than the threshold.
    * Under `fair`, the victim's tenant has at least eight times the rows that the other tenant will have.
    * While the urgent request waits for memory, the victim is not admitted again. A victim with fewer tokens than the
      urgent request may be, in the short part of a plan.
    * The victims of one plan make room for the urgent request, as far as blocks are concerned.
    * When memory runs out, every request that ranks behind the victim loses its row too, except one that has generated
      no token since its own last preemption.
    """

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched)
        self._core = watched.core
        self._eligibility = eligibility
        self._keys = PolicyKeys(watched)
        self._ranks: dict[Stream, tuple[float, float]] = {}
        """By stream, the smallest and the largest possible key at its last admission."""
        self._urgent: dict[Stream, None] = {}
        """Requests for which the current plan preempts others."""
        self._behind: dict[Stream, Stream] = {}
        """By victim that waits: the urgent request for which it was preempted."""
        self._back: list[tuple[Stream, Stream]] = []
        """Victims that the current plan admits, each with its urgent request."""

    def before(self, event: ev.Event) -> None:
        match event:
            case ev.CreditGranted():
                stream = self.clients.find(StreamName(event.frontend, event.stream))
                if stream is not None:
                    self._behind.pop(stream, None)  # The request may have waited for credit. It is then queued again.
            case ev.WorkerHello() | ev.WorkerLost() | ev.DrainRequested() | ev.ResumeRequested():
                self._behind.clear()

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        self._behind.pop(stream, None)
        if outcome != "preempted":
            return
        by = self._cause(stream)
        if by is None or by is stream:
            return
        is_urgent = by in self.book.waiting
        if is_urgent and self.config.policy_of(by.demand.tenant) == "fair":
            self._check_rows(stream, by)
            return
        self._check_rank(stream, by, is_urgent=is_urgent)
        if is_urgent:
            self._urgent[by] = None
            self._behind[stream] = by
            self.seen(Limit.URGENT)
        else:
            self._check_last(stream, epoch)

    def _cause(self, stream: Stream) -> Stream | None:
        """Return the request for which a stream was just preempted; None if the history does not show it."""
        story = self._core.story(*stream.name)
        if story is None or len(story.notes) >= _MOST_NOTES:
            return None
        kinds = (NoteKind.PREEMPTED, NoteKind.SWAPPED)
        by = next((note.by for note in reversed(story.notes) if note.kind in kinds), None)
        return None if by is None else self.clients.live.get(StreamName(*by))

    def _check_rank(self, victim: Stream, by: Stream, *, is_urgent: bool) -> None:
        same_class = self.config.same_class(victim.demand.tenant, by.demand.tenant)
        if is_urgent and not same_class:
            raise ViolationError("preempt.class", f"for {by.name}, which is of another class", victim.name)
        if not same_class:
            return  # Ranks in different classes are not comparable.
        first = self._keys.smallest(by) if is_urgent else self._ranks[by][0]
        distance = self._ranks[victim][1] - first
        threshold = self.config.preempt_threshold if is_urgent else 0.0
        later = self.book.sequence[victim] > self.book.sequence[by]
        if distance < threshold or (distance == threshold and (is_urgent or not later)):
            raise ViolationError("preempt.rank", f"for {by.name}, {distance:.3f} before it", victim.name)

    def _check_rows(self, victim: Stream, by: Stream) -> None:
        streams = [each for each in self.book.sequence if each is not victim]
        num_mine = 1 + sum(is_in_row(each) for each in streams if each.demand.tenant == by.demand.tenant)
        theirs = (each for each in streams if each.demand.tenant == victim.demand.tenant)
        num_theirs = 1 + sum(each.epoch is not None for each in theirs)
        if num_theirs < ROWS_PER_ROW * num_mine:
            what = f"one of {num_theirs} rows of its tenant, for {by.name}, whose tenant then has {num_mine}"
            raise ViolationError("preempt.rows", what, victim.name)

    def _check_last(self, victim: Stream, epoch: Epoch) -> None:
        if self.config.classes:
            return
        for other in self.book.sequence:
            if other.epoch is not epoch or other is victim or len(other.tokens) <= other.preempted_at:
                continue
            if is_in_row(other) and self._ranks[other][0] > self._ranks[victim][1]:
                raise ViolationError("preempt.last", f"{other.name} ranks behind it and keeps its row", victim.name)

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        self._ranks[stream] = self._keys.smallest(stream), self._keys.largest(stream)
        by = self._behind.pop(stream, None)
        if by is not None and self._keys.largest(by) < self._keys.smallest(stream):
            self._back.append((stream, by))

    @staticmethod
    def _shares(stream: Stream, epoch: Epoch) -> bool:
        """Return whether a waiting request may share blocks with a row."""
        first = stream.first_tokens(epoch.model.block_size)
        return any(row.tokens[: len(first)] == first for row in epoch.model.rows.values())

    def asked(self, epoch: Epoch) -> None:
        self._urgent.clear()
        self._back.clear()

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        urgent, self._urgent = self._urgent, {}
        for stream in urgent:
            if stream in self.book.waiting:
                self._check_room(stream, plan, epoch)
        for victim, by in self._back:
            if by in self.book.waiting:
                self._check_order(victim, by, plan, epoch)
        self._back.clear()
        if plan.admissions:
            self._behind = {victim: by for victim, by in self._behind.items() if by in self.book.waiting}

    def _check_order(self, victim: Stream, by: Stream, plan: Plan, epoch: Epoch) -> None:
        """Check that the urgent request waits for something other than memory, or that the victim may be short."""
        if len(self.cluster.sites) > 1 or self._eligibility.has_quota(by) or by in self._behind:
            return
        if self.config.serves_short_first and victim.num_known <= by.num_known:
            return
        # A request was held before the plan's chunks were chosen if this plan completes its prefix.
        computing = [row for row in map(epoch.model.rows.get, plan.chunk_rows.tolist()) if row is not None]
        if self._eligibility.shares_prefix_with(by, computing, epoch):
            return
        memory = self._eligibility.memory(epoch, without=victim)
        obstacle = self._eligibility.obstacle(by, epoch, memory, without=victim)
        if obstacle is None or (
            obstacle is Obstacle.MEMORY and self._eligibility.held_by(by, epoch, without=victim) is None
        ):
            raise ViolationError("order.victim", f"it runs again before {by.name}", victim.name)

    def _check_room(self, stream: Stream, plan: Plan, epoch: Epoch) -> None:
        """Check that the victims released enough blocks for a request that shares no block."""
        model = epoch.model
        if self._shares(stream, epoch):
            return
        needed = -(-stream.num_known // model.block_size)
        # Running rows may take blocks in the same plan.
        if model.num_kv_groups > 1:
            return  # Tables for windows do not say which of their blocks are still in use.
        left = model.num_unnamed + len(plan.append_rows) + sum(len(each.blocks) for each in plan.admissions)
        if left < needed:
            raise ViolationError("preempt.needless", f"victims leave {left} blocks, it needs {needed}", stream.name)

    def ended(self, stream: Stream) -> None:
        self._ranks.pop(stream, None)
        self._behind.pop(stream, None)
