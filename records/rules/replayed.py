"""Checks the promises of the core while the requests in a record are served again.

A record that other code has made cannot be compared plan by plan. The following must hold for any code:

* every plan follows the rules of the plan protocol: rows, blocks, budgets, and which KV a row may read or write. The
  simulator's model worker (`records.rules.model_worker`) checks the rules with the KV of every token;
* the core's own invariants hold;
* every request ends exactly once, gets its tokens in order and none after its end, and ends naturally only with the
  requested number of tokens.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from records.rules.model_worker import ModelWorker, Row
from records.rules.violation import StreamName, ViolationError
from records.whatif.figures import NATURAL_ENDS
from records.whatif.load import Arrival
from records.whatif.saved import Service
from records.whatif.simulate import simulate
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler

_CHECK_EVERY = 64
"""Number of events between two checks of the core's invariants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Number of checked requests, plans, tokens, and blocks from disk, if no promise was broken."""

    requests: int
    plans: int
    tokens: int
    read_blocks: int


def check(arrivals: Sequence[Arrival], service: Service, *, seed: int = 0) -> Kept:
    """Serve requests and check every plan and every effect.

    Raises:
        ViolationError: a promise was broken.
        AssertionError: an invariant of the core was broken.
        SimulationError: the requests cannot be served.
    """
    # The worker identifies KV by token ids, but the token ids generated for earlier requests are unknown.
    plain = [dataclasses.replace(each, following_keys=b"") for each in arrivals]
    watched: list[_Watched] = []

    def make_core(config: CoreConfig, incarnation: int, facts: TokenFacts) -> Scheduler:
        watched.append(_Watched(config, incarnation, facts, plain))
        return watched[0]

    simulate(
        plain,
        service.members,
        service.config,
        service.times,
        acceptance=service.acceptance,
        seed=seed,
        make_core=make_core,
        watch=lambda plan, answer: watched[0].executed(plan, answer),
    )
    return watched[0].at_rest()


class _Follower(ModelWorker):
    """A model worker that takes tokens and drafts from the simulation, which does not sample as the oracle does."""

    def follow(self, plan: Plan, answer: ev.StepDone) -> None:
        """Execute a plan with the result that the simulation gave."""
        self._drafts: dict[int, tuple[int, int]] = {}
        if answer.counts is not None and answer.draft_counts is not None:
            drafts = zip(answer.draft_counts.tolist(), (answer.counts - 1).tolist(), strict=True)
            self._drafts = dict(zip(answer.rows.tolist(), drafts, strict=True))
        own = self.execute(plan)
        if own.failures or own.rows.tolist() != answer.rows.tolist():
            raise ViolationError("worker.failure", f"step {plan.step} of {plan.worker!r}: {own.failures}, {own.rows}")

    def _next_token(self, row: Row) -> int:
        return row.name.stream

    def _propose(self, row: Row) -> int:
        num_drafts, _ = self._drafts.get(row.index, (0, 0))
        if num_drafts > min(row.draft_limit, self._room(row)):
            raise ViolationError("plan.drafts", f"{num_drafts} drafts do not fit row {row.index}", row.name)
        return num_drafts

    def _num_accepted(self, row: Row, num_drafts: int) -> int:
        return self._drafts[row.index][1] if num_drafts else 0


class _Disk:
    """Content of a worker's disk. A job that uses a block of another job or step is a violation."""

    def __init__(self, model: ModelWorker) -> None:
        self._model = model
        self._files: dict[int, tuple[DiskBlock, list[int], Row | None]] = {}
        """For each slot: the block, its values and the row that computed it."""
        self._jobs: dict[int, DiskJob] = {}
        self.num_read = 0

    def ordered(self, job: DiskJob) -> None:
        """Check a job that begins."""
        if job.action is DiskAction.CLEAR:
            self._files.clear()
            return
        used = {block.slot for each in self._jobs.values() for block in each.blocks}
        if not used.isdisjoint(block.slot for block in job.blocks):
            raise ViolationError("disk.fence", f"a slot is used by two jobs: {job}")
        for host_block in job.host_blocks:
            if host_block in self._model.host_in_use:
                raise ViolationError("disk.fence", f"host block {host_block} is used by two jobs")
            self._model.check_host_unused(host_block)
            self._model.host_in_use[host_block] = job.action is DiskAction.READ
        self._jobs[job.copy_id] = job

    def ended(self, report: ev.DiskReported) -> None:
        """Copy the content of a job that ends."""
        job = self._jobs.pop(report.copy_id, None)
        if job is None:
            return
        for host_block, block in zip(job.host_blocks, job.blocks, strict=True):
            del self._model.host_in_use[host_block]
            if job.action is DiskAction.WRITE:
                values, _ = self._model.host_content(host_block)
                self._files[block.slot] = block, values, self._model.host_writer(host_block)
                continue
            found, values, writer = self._files[block.slot]
            if found != block:
                raise ViolationError("disk.block", f"{block} is read, but its slot contains {found}")
            self._model.set_host_content(host_block, values, None, writer)
            self.num_read += 1


class _Watched(Scheduler):
    """A core whose plans a model worker executes, and whose effects are checked."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts, arrivals: Sequence[Arrival]) -> None:
        super().__init__(config, incarnation, facts)
        self._limits = config
        self._arrivals = arrivals
        self._models: dict[ev.Peer, _Follower] = {}
        self._num_tokens: dict[StreamName, int] = {}
        """For each live request's name, the number of tokens that it has received."""
        self._ended: set[StreamName] = set()
        self._disks: dict[ev.Peer, _Disk] = {}
        self._num_events = self._num_plans = self._sum_tokens = 0

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        if isinstance(event, ev.WorkerHello):
            self._models[event.worker] = _model(event, self._limits)
            self._disks[event.worker] = _Disk(self._models[event.worker])
        elif isinstance(event, ev.DiskReported):
            self._disks[event.worker].ended(event)
        elif isinstance(event, ev.WorkerLost):
            del self._models[event.worker], self._disks[event.worker]
        elif isinstance(event, ev.StepDone):
            self._models[event.worker].answered_step = event.step
        elif isinstance(event, ev.RequestArrived):
            num_delivered = len(event.token_ids) - event.spec.num_prompt_tokens
            self._num_tokens[StreamName(event.frontend, event.stream)] = num_delivered
        effects = super().handle(event, now)
        self._check(effects)
        self._num_events += 1
        if self._num_events % _CHECK_EVERY == 0:
            self.validate()
        return effects

    def plan(self, peer: ev.Peer, now: float) -> tuple[Plan | None, list[ef.Effect]]:
        plan, effects = super().plan(peer, now)
        self._check(effects)
        return plan, effects

    def executed(self, plan: Plan, answer: ev.StepDone) -> None:
        """Let the model worker execute a plan that the simulation has executed."""
        self._num_plans += 1
        self._models[plan.worker].follow(plan, answer)

    def _check(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ef.WorkerWelcomed):
                self._models[effect.worker].welcome(effect.epoch)
            elif isinstance(effect, ef.WorkerUnknown):
                raise ViolationError("worker.unknown", f"{effect.worker!r} was given up although it answered in time")
            elif isinstance(effect, ef.DiskJobWanted):
                self._disks[effect.worker].ordered(effect.job)
            elif isinstance(effect, ef.TokensReady):
                self._check_tokens(effect)
            elif isinstance(effect, ef.RequestEnded):
                self._check_end(effect)

    def _check_tokens(self, effect: ef.TokensReady) -> None:
        streams, indices = effect.each()
        for stream, index in zip(streams.tolist(), indices.tolist(), strict=True):
            name = StreamName(effect.frontend, stream)
            if self._num_tokens.get(name) != index:
                expected = self._num_tokens.get(name, "none: it is not live")
                raise ViolationError("tokens.order", f"token {index}, expected was {expected}", name)
            self._num_tokens[name] += 1
            self._sum_tokens += 1

    def _check_end(self, end: ef.RequestEnded) -> None:
        name = StreamName(end.frontend, end.stream)
        if name in self._ended or name not in self._num_tokens:
            raise ViolationError("end.once", "it ended twice, or never arrived", name)
        self._ended.add(name)
        got, arrival = self._num_tokens.pop(name), self._arrivals[end.stream]
        if end.reason in NATURAL_ENDS and not arrival.spec.pooling and end.completion_tokens != arrival.num_outputs:
            raise ViolationError(
                "end.tokens", f"it ended with {end.completion_tokens} tokens instead of {arrival.num_outputs}", name
            )
        if end.completion_tokens > got:
            raise ViolationError("end.tokens", f"{end.completion_tokens} tokens count, {got} were delivered", name)

    def at_rest(self) -> Kept:
        """After all requests have ended, check that none runs or waits and that no block is held; return the counts."""
        self.validate()
        if self._num_tokens or len(self._ended) != len(self._arrivals):
            raise ViolationError("end.once", f"{len(self._arrivals) - len(self._ended)} requests have not ended")
        stats = self.stats()
        held = sum(worker.blocks_held + worker.host_blocks_held for worker in stats.workers)
        if stats.running or stats.waiting or held:
            raise ViolationError("empty", f"{stats.running} run, {stats.waiting} wait, {held} blocks are held")
        return Kept(
            requests=len(self._ended),
            plans=self._num_plans,
            tokens=self._sum_tokens,
            read_blocks=sum(disk.num_read for disk in self._disks.values()),
        )


def _model(hello: ev.WorkerHello, config: CoreConfig) -> _Follower:
    model = _Follower(
        peer=hello.worker,
        num_blocks=hello.num_blocks,
        block_size=hello.block_size,
        max_rows=hello.max_rows,
        max_tokens_per_step=hello.max_tokens_per_step,
        max_model_len=hello.model.max_model_len,
        num_host_blocks=hello.num_host_blocks,
        num_disk_blocks=hello.num_disk_blocks,
        max_draft_tokens=hello.max_draft_tokens,
        state_bytes=hello.model.state_bytes,
        num_checkpoints=hello.num_checkpoints,
        num_host_states=hello.num_host_states,
        num_kv_groups=hello.num_kv_groups,
        window=hello.window,
        window_chunk=hello.window_chunk,
    )
    if config.max_tokens_in_paged_kv_cache:
        most = max(1, config.max_tokens_in_paged_kv_cache // hello.block_size)
        model.num_usable = min(hello.num_blocks, most)
    return model
