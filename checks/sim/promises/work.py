"""No worker is idle while it could run a waiting request."""

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.promises.blame import Suspects
from checks.sim.promises.eligible import Eligibility, Obstacle, assigned_s
from checks.sim.promises.limits import drafts_of, most_tokens_of
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import ViolationError
from scheduler_svc.core.interface.plan import Plan

_CHANCES = 4
"""Plans within which a request that can start must start. A step in flight may still use the resources it needs."""
_REFILL_S = 0.02
"""Interval at which the token rates of tenants are examined."""


class RowsGoOn(Promise):
    """Every decode row whose reader has credit is in every step, unless it needs a block and no block is free.

    A row with drafts in flight may wait, because its number of tokens is unknown. While a suspect runs alone, the other
    rows wait.
    """

    def __init__(self, watched: Watched, suspects: Suspects) -> None:
        super().__init__(watched)
        self._suspects = suspects

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        names = epoch.in_flight[-1].names
        for row in epoch.model.rows.values():
            if not row.held or row.name in names:
                continue
            stream = self.clients.live.get(row.name)
            if stream is None or stream.epoch is not epoch or len(row.tokens) - row.num_prompt >= stream.allowed:
                continue
            if row.drafted_step > epoch.model.answered_step:
                continue
            if row.computed >= len(row.blocks) * epoch.model.block_size or self._suspects.may_try_alone:
                continue
            raise ViolationError("work.held", f"row {row.index} sits out step {plan.step} without need", row.name)

    def no_plan(self, epoch: Epoch) -> None:
        for stream in self.clients.live.values():
            if stream.epoch is epoch and not stream.starved:
                raise ViolationError("work.running", f"{epoch.peer!r} is idle and could go on with it", stream.name)


class WorkConservation(Promise):
    """A worker with a free row admits a waiting request that it could run, within a few plans.

    Only requests that lack memory may hold up others (`AdmissionOrder` limits how long). Where requests run in batches,
    this holds for empty workers, after the time to collect a batch is over.
    """

    def __init__(self, watched: Watched, eligibility: Eligibility) -> None:
        super().__init__(watched)
        self._eligibility = eligibility
        self._chances: dict[Epoch, dict[Stream | str, tuple[int, float]]] = {}
        """By worker, the requests that it could have admitted in its last plans, with the number of plans and the first
        time, without the time for which the scheduler stalled.

        A tenant's name represents one of its requests if its quota does not permit all of them.
        """

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not self.book.waiting or plan.num_tokens + drafts_of(epoch.model) >= most_tokens_of(self, epoch.model):
            self._chances.pop(epoch, None)
        elif (epoch.model.break_even_context or self.config.itl_target_s) and len(plan.chunk_rows):
            self._chances.pop(epoch, None)  # Attention or the step target may have used up the budget.
        elif plan.swap_ins:
            self._chances.pop(epoch, None)  # The first request's prefix is copied to the device; no other overtakes it.
        else:
            self._look(epoch, len(plan.admissions))

    def no_plan(self, epoch: Epoch) -> None:
        self.seen(Limit.IDLE)
        if self.book.waiting:
            self.seen(Limit.IDLE_WITH_WAITING)
            self._look(epoch, 0)

    def _look(self, epoch: Epoch, num_admitted: int) -> None:
        before = self._chances.pop(epoch, {})
        config, now = self.config, self.world.now - self.world.stalled_s
        running = next(each.rows_running for each in self.stats().workers if each.worker_id == epoch.worker_id)
        # A request leaves its row once its only step is planned, but the plan had no other row to assign.
        if running + num_admitted >= min(config.max_num_seqs, epoch.model.max_rows):
            return
        busy = running or epoch.in_flight
        if busy and (config.batching.mode != "continuous" or self._collects(epoch)):
            return
        admissible = self._admissible(epoch)
        chances = self._chances[epoch] = {each: self._one_more(before.get(each, (0, now))) for each in admissible}
        patience = self._patience()
        for each, (count, since) in chances.items():
            if count > _CHANCES and now - since > patience:
                what = f"{epoch.peer!r} has {running} rows in use and could have admitted it in {count} plans"
                raise ViolationError("work.waiting", what, admissible[each].name)

    @staticmethod
    def _one_more(chances: tuple[int, float]) -> tuple[int, float]:
        count, since = chances
        return count + 1, since

    def _admissible(self, epoch: Epoch) -> dict[Stream | str, Stream]:
        """Return what the worker could admit now, with an example request; empty if memory may be short."""
        memory = self._eligibility.memory(epoch)
        admissible: dict[Stream | str, Stream] = {}
        rivals: dict[str, Stream] = {}
        held: set[str] = set()
        """Tenants with a request that has its own obstacle. The quota may permit exactly this request."""
        for stream in self.book.waiting:
            obstacle = self._eligibility.obstacle(stream, epoch, memory)
            # A request that may begin a session may also continue one, and then holds up others for memory.
            is_held = obstacle is Obstacle.SESSION and self._eligibility.may_lack_memory(stream, epoch, memory)
            if obstacle is Obstacle.MEMORY or is_held:
                return {}
            if obstacle is None:
                admissible[stream] = stream
            elif obstacle is Obstacle.RIVALS:
                rivals[stream.demand.tenant] = stream
            else:
                held.add(stream.demand.tenant)
        return admissible | {tenant: stream for tenant, stream in rivals.items() if tenant not in held}

    def _patience(self) -> float:
        """Return how long the core may leave a request to another worker, or collect a batch."""
        batching = self.config.batching
        patience = 0.0 if batching.mode == "continuous" else 2 * batching.max_wait_s
        if self.config.tenant_limits:
            patience += _REFILL_S
        return patience + assigned_s(self)

    def _collects(self, epoch: Epoch) -> bool:
        """Return whether the delay factor may make the worker wait for more requests."""
        factor = self.config.batching.delay_factor
        return factor > 0 and self.world.now - epoch.last_admission < factor * self.cluster.longest_step
