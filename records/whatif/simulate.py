"""Simulates a load: runs the service's event loop over the real core, in virtual time.

Each iteration of the loop works as in `scheduler_svc.service`. It first handles everything that has arrived, then the
tick, then the due plans. The loop sleeps until the next event, tick, or due plan. A worker begins a step when it has
the plan and the previous step's result is known.

Workers verify drafts only if an `Acceptance` is given; see `acceptance`.

Simplifications: the scheduler decides in no time, clients read every token immediately, grammars are already compiled,
no step is overdue (a worker is lost only when it was lost in the record), and workers begin with an empty prefix cache
and an empty disk.
"""

import dataclasses
import heapq
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from records.whatif.acceptance import Acceptance, Drafting
from records.whatif.disk import SimulatedDisk, StepClock, assumed
from records.whatif.figures import Figures, Numbers, Timeline
from records.whatif.load import Arrival, Member, most_members
from records.whatif.rows import Admitted, Rows, Work
from records.whatif.step_times import StepTimes
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import Int32Array
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import EndReason, Peer
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.worker.hub import PING_INTERVAL_S
from shared.prefix_keys import KEY_BYTES, BlockKey
from shared.request_spec import Pooling

_FRONTEND: Peer = b"whatif/1"
_VOCAB = (1 << 31) - 1
_STOP = _VOCAB - 1
"""Stop token for every request that ends with one; no other token has this number."""
START_S = 1000.0
"""Core time at the beginning."""
_LONG_STEP_S = 0.5
"""The core is notified before longer steps, so that they are not overdue. Its shortest deadline is longer."""
_JOIN_AGAIN_S = 1.0
"""Time after which a worker that the core considers lost reconnects."""
_MOST_TURNS_WITHOUT_PROGRESS = 2_000_000

MakeCore = Callable[[CoreConfig, int, TokenFacts], Scheduler]
Watch = Callable[[Plan, ev.StepDone], None]


class SimulationError(ValueError):
    """A load cannot be served with these settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Outcome of a simulation."""

    figures: Figures
    steps: int
    seconds: float
    """CPU time that the simulation took."""
    extrapolated_share: float
    """Share of steps that are larger than every step in the record."""

    @property
    def scheduler_load(self) -> float:
        """Fraction of one core that the decisions would take on this machine. In virtual time, they take no time."""
        return self.seconds / self.figures.duration_s

    @property
    def steps_per_second(self) -> float:
        """Simulated steps per second of one core."""
        return self.steps / max(self.seconds, 1e-9)


class _KnownKeys(TokenFacts):
    """Token facts for synthetic tokens: keys from the record where known, otherwise keys that no two requests share."""

    def __init__(self) -> None:
        self.following: dict[int, bytes] = {}
        """By request: the keys of its next blocks, if the record contains them."""

    def following_keys(self, parent: BlockKey, tokens: bytes, block_size: int) -> bytes:
        count = len(tokens) // (4 * block_size)
        number = int.from_bytes(tokens[:4], "little")
        known = self.following.get(number, b"")[: KEY_BYTES * count]
        if not known:
            return super().following_keys(parent, tokens, block_size)
        self.following[number] = self.following[number][len(known) :]
        rest = tokens[len(known) // KEY_BYTES * 4 * block_size :]
        return known + super().following_keys(known[-KEY_BYTES:], rest, block_size)


@dataclass(slots=True)
class _Worker:
    hello: ev.WorkerHello
    rows: Rows
    disk: SimulatedDisk | None = None
    steps: StepClock | None = None
    """Is None if the worker handles messages during steps."""
    epoch: int = 0
    is_answered_at: float = 0.0
    """When its newest step will be answered."""


@dataclass(slots=True)
class _State:
    """State of the requests in a simulation."""

    arrivals: Sequence[Arrival]
    limits: Numbers = field(init=False)
    """For each request, the sequence length at which it samples its stop token; 0 if it never does."""
    leaves_at: Numbers = field(init=False)
    """For each request, the number of generated tokens at which its client cancels it; 0 for never."""

    def __post_init__(self) -> None:
        number = len(self.arrivals)
        self.limits = np.zeros(number, np.int64)
        self.leaves_at = np.zeros(number, np.int64)
        for at, each in enumerate(self.arrivals):
            if each.end is EndReason.STOP:
                self.limits[at] = each.spec.num_prompt_tokens + each.num_outputs
            elif each.end in (EndReason.STOP_STRING, EndReason.CANCELLED) and each.cancelled_after is None:
                self.leaves_at[at] = max(1, each.num_outputs)


def simulate(
    arrivals: Sequence[Arrival],
    members: Sequence[Member],
    config: CoreConfig,
    times: StepTimes,
    *,
    acceptance: Acceptance | None = None,
    seed: int = 0,
    make_core: MakeCore = Scheduler,
    watch: Watch | None = None,
) -> Simulated:
    """Simulate the service of a load and return the results.

    Args:
        arrivals: the requests, in order of time.
        members: the workers.
        config: the configuration of the core.
        times: the model of step times.
        acceptance: which drafts are accepted; None if workers verify none.
        seed: seed for the random variation of step times.
        make_core: creates a core from a configuration, an incarnation and token facts.
        watch: called with each plan and its result when a worker begins the step.

    Raises:
        SimulationError: the core refuses a worker, or the load cannot end.
    """
    return _Simulation(arrivals, members, config, times, acceptance, seed, make_core, watch).run()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        members: Sequence[Member],
        config: CoreConfig,
        times: StepTimes,
        acceptance: Acceptance | None,
        seed: int,
        make_core: MakeCore,
        watch: Watch | None,
    ) -> None:
        self._members = members
        self._times = times
        self._rng = random.Random(seed)
        self._drafting = None
        if acceptance is not None:
            self._drafting = Drafting(acceptance, [each.drafts for each in arrivals], random.Random(seed))
        self._watch = watch
        self._facts = _KnownKeys()
        self._core = make_core(config, 1 << 62, self._facts)
        self._timeline = Timeline()
        self._state = _State(arrivals)
        self._workers: dict[Peer, _Worker] = {}
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_acts = self._num_members = 0
        self._now = START_S
        self._steps = self._extrapolated = 0
        self._next_arrival = 0
        self._carry_out: dict[type, Callable[[Any], None]] = {
            ef.TokensReady: self._tokens,
            ef.RequestEnded: self._ended,
            ef.WorkerRefused: self._refused,
            ef.WorkerUnknown: self._unknown,
            ef.WorkerWelcomed: self._welcomed,
            ef.DiskJobWanted: self._disk_job,
        }

    def run(self) -> Simulated:
        """Serve all requests."""
        began = time.process_time()
        self._core.handle(ev.FrontendJoined(frontend=_FRONTEND), self._now)
        for member in self._members:
            self._at(START_S + member.joined, self._join, member)
        self._schedule_arrival()
        self._loop()
        return Simulated(
            figures=self._timeline.figures(most_members(self._members)),
            steps=self._steps,
            seconds=time.process_time() - began,
            extrapolated_share=self._extrapolated / max(1, self._steps),
        )

    # ---------------------------------------------------------------- the loop

    def _loop(self) -> None:
        core, agenda = self._core, self._agenda
        ticked_at = planned_at = self._now
        idle_turns = 0
        while agenda or not core.is_idle:
            wake = agenda[0][0] if agenda else float("inf")
            if not core.is_idle:
                wake = min(wake, ticked_at + PING_INTERVAL_S)
                due = core.next_plan_due(planned_at)
                wake = wake if due is None else min(wake, due)
            self._now = max(self._now, wake)
            steps = self._steps
            while agenda and agenda[0][0] <= self._now:
                _, _, act, arguments = heapq.heappop(agenda)
                act(*arguments)
            if self._now >= ticked_at + PING_INTERVAL_S:
                ticked_at = self._now
                self._feed(ev.TimePassed())
            planned_at = self._now
            for peer in core.due_workers(planned_at):
                self._plan(peer)
            idle_turns = 0 if steps != self._steps or self._next_arrival < len(self._state.arrivals) else idle_turns + 1
            if idle_turns > _MOST_TURNS_WITHOUT_PROGRESS:
                raise SimulationError("simulation: requests wait forever with these settings; please report this")

    def _at(self, when: float, act: Callable[..., None], *arguments: object) -> None:
        self._num_acts += 1
        heapq.heappush(self._agenda, (when, self._num_acts, act, arguments))

    def _feed(self, event: ev.Event) -> None:
        self._receive(self._core.handle(event, self._now))

    def _receive(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            if (act := self._carry_out.get(type(effect))) is not None:
                act(effect)

    # ---------------------------------------------------------------- clients

    def _schedule_arrival(self) -> None:
        if self._next_arrival < len(self._state.arrivals):
            self._at(START_S + self._state.arrivals[self._next_arrival].at, self._arrive)

    def _arrive(self) -> None:
        arrival = self._state.arrivals[self._next_arrival]
        self._next_arrival += 1
        self._schedule_arrival()
        now, spec = self._now, arrival.spec
        number = self._timeline.arrived(
            now,
            spec.num_prompt_tokens,
            left_out=arrival.left_out,
            first_by=_moved(arrival.ttft_deadline, now),
            last_by=_moved(arrival.total_deadline, now),
        )
        if arrival.following_keys:
            self._facts.following[number] = arrival.following_keys
        if arrival.end is EndReason.STOP:
            spec = spec._replace(stop_token_ids=_STOP.to_bytes(4, "little"))
        if arrival.cancelled_after is not None:
            self._at(now + arrival.cancelled_after, self._cancel, number, 0)
        self._feed(
            ev.RequestArrived(
                frontend=_FRONTEND,
                stream=number,
                spec=spec,
                token_ids=_made_up(number, arrival),
                credit=4 * (spec.max_tokens + 8),
                deadline=_moved(arrival.deadline, now),
                ttft_deadline=_moved(arrival.ttft_deadline, now),
                total_deadline=_moved(arrival.total_deadline, now),
                block_keys=arrival.keys,
                block_size=arrival.block_size,
                accepted=arrival.accepted,
            )
        )

    def _tokens(self, effect: ef.TokensReady) -> None:
        numbers = effect.streams.astype(np.int64)
        self._timeline.tokens(numbers, self._now)
        leaves_at = self._state.leaves_at[numbers]
        ends = effect.first_indices + (1 if effect.counts is None else effect.counts)
        for at in np.flatnonzero((leaves_at > 0) & (ends >= leaves_at)).tolist():
            number = int(numbers[at])
            self._at(self._now + self._times.link_s, self._cancel, number, int(leaves_at[at]))
            self._state.leaves_at[number] = 0

    def _cancel(self, number: int, kept: int) -> None:
        if not self._timeline.is_live(number):
            return
        if self._state.arrivals[number].end is EndReason.STOP_STRING:
            self._feed(ev.StopMatched(frontend=_FRONTEND, stream=number, keep_tokens=kept))
        else:
            self._feed(ev.RequestCancelled(frontend=_FRONTEND, stream=number))

    def _ended(self, end: ef.RequestEnded) -> None:
        self._timeline.ended(
            end.stream,
            self._now,
            end.reason,
            outputs=end.completion_tokens,
            cached=end.cached_prompt_tokens,
            preemptions=end.preemptions,
        )

    # ---------------------------------------------------------------- workers

    def _join(self, member: Member) -> None:
        self._num_members += 1
        peer = b"whatif-worker/%d" % self._num_members
        facts = dataclasses.replace(member.hello.model, vocab_size=_VOCAB)
        hello = dataclasses.replace(
            member.hello,
            worker=peer,
            worker_id=f"worker-{self._num_members}",
            model=facts,
            max_draft_tokens=member.hello.max_draft_tokens if self._drafting is not None else 0,
            num_disk_blocks=member.hello.num_disk_blocks if member.hello.num_host_blocks else 0,
            reason=ev.HelloReason.STARTED,
        )
        self._workers[peer] = _Worker(hello, Rows(hello))
        if hello.num_disk_blocks:
            if hello.device.startswith("cpu"):
                self._workers[peer].steps = StepClock()
            times = self._times.disk or assumed(hello.block_bytes)
            self._workers[peer].disk = SimulatedDisk(times)
        self._feed(hello)
        if member.lost is not None:
            self._at(max(self._now, START_S + member.lost), self._lose, peer)

    def _lose(self, peer: Peer) -> None:
        if self._workers.pop(peer, None) is not None:
            self._feed(ev.WorkerLost(worker=peer, reason="it was lost in the record"))

    def _refused(self, effect: ef.WorkerRefused) -> None:
        raise SimulationError(f"workers: refused with these settings: {effect.reason}")

    def _unknown(self, effect: ef.WorkerUnknown) -> None:
        worker = self._workers.pop(effect.worker, None)
        if worker is not None:
            self._at(self._now + _JOIN_AGAIN_S, self._join, Member(hello=worker.hello))

    def _welcomed(self, effect: ef.WorkerWelcomed) -> None:
        worker = self._workers[effect.worker]
        worker.epoch = effect.epoch
        if worker.disk is not None:
            self._report(ev.DiskReported(worker=effect.worker, epoch=effect.epoch, is_complete=True))

    def _disk_job(self, effect: ef.DiskJobWanted) -> None:
        worker = self._workers[effect.worker]
        assert worker.disk is not None, "a job for a worker without a disk"
        self._at(self._boundary(worker), self._order, effect)

    def _order(self, effect: ef.DiskJobWanted) -> None:
        worker = self._workers.get(effect.worker)
        if worker is not None and worker.disk is not None:
            worker.disk.order(effect.job)
            self._start_disk(effect.worker)

    def _boundary(self, worker: _Worker) -> float:
        """Return when a worker next handles messages."""
        return self._now if worker.steps is None else worker.steps.boundary(self._now)

    def _start_disk(self, peer: Peer) -> None:
        worker = self._workers.get(peer)
        if worker is None or worker.disk is None or (started := worker.disk.start()) is None:
            return
        job, seconds = started
        report = ev.DiskReported(worker=peer, epoch=worker.epoch, copy_id=job.copy_id, seconds=seconds)
        self._at(self._now + seconds, self._disk_ended, report)

    def _disk_ended(self, report: ev.DiskReported) -> None:
        worker = self._workers.get(report.worker)
        if worker is None or worker.disk is None:
            return
        worker.disk.ended()
        self._at(self._now + worker.disk.latency_s, self._send_report, report)
        self._start_disk(report.worker)

    def _send_report(self, report: ev.DiskReported) -> None:
        worker = self._workers.get(report.worker)
        if worker is not None:
            self._at(self._boundary(worker), self._report, report)

    def _report(self, report: ev.DiskReported) -> None:
        if report.worker in self._workers:
            self._feed(report)

    def _plan(self, peer: Peer) -> None:
        core = self._core
        while True:
            plan, effects = core.plan(peer, self._now)
            self._receive(effects)
            if plan is None:
                return
            self._execute(plan)
            core.tidy()

    def _execute(self, plan: Plan) -> None:
        worker, times = self._workers[plan.worker], self._times
        rows = worker.rows
        rows.leave(plan.leaves)
        rows.admit(
            [
                Admitted(
                    each.row,
                    each.generation,
                    each.stream,
                    len(each.token_ids),
                    each.num_computed_tokens,
                    each.spec.pooling == Pooling.NONE,
                    len(each.blocks),
                )
                for each in plan.admissions
            ]
        )
        rows.grow(plan.append_rows)
        rows.hold(plan.holds, plan.releases)
        rows.limit_drafts(plan.draft_rows, plan.draft_limits)
        copies = (*plan.swap_outs, *plan.swap_ins)
        copied = sum(len(copy.sources) for copy in copies)
        work = rows.compute(plan.chunk_rows, plan.chunk_lengths, copied)
        assert work.shape.decodes == plan.num_decodes, "the plan counts other rows than the worker"
        shape, requests, lengths = work.shape, work.requests, work.lengths
        counts = draft_counts = None
        num_accepted = 0
        if self._drafting is not None and work.most_drafts.any():
            verified, accepted = self._verify(self._drafting, work)
            rows.accept(work, accepted)
            shape = shape._replace(drafts=int(verified.sum()))
            num_accepted = int(accepted.sum())
            counts, draft_counts = (accepted + 1).astype(np.int32), verified.astype(np.int32)
            requests = np.repeat(requests, counts)
            lengths = np.repeat(lengths + counts - counts.cumsum(), counts) + np.arange(len(requests))
        self._steps += 1
        self._extrapolated += times.extrapolates(shape)
        seconds = times.scattered(shape, self._rng.random()) * times.pace_at(self._now - START_S)
        earliest = self._now + times.link_s
        idle = max(0.0, earliest - worker.is_answered_at) if worker.is_answered_at else 0.0
        begin = max(worker.is_answered_at, earliest)
        worker.is_answered_at = begin + seconds
        if worker.steps is not None:
            worker.steps.add(begin, worker.is_answered_at)
        if work.num_rows:
            self._timeline.step(work.num_rows, seconds, drafts=shape.drafts, accepted=num_accepted)
        answer = ev.StepDone(
            worker=plan.worker,
            epoch=plan.epoch,
            step=plan.step,
            rows=work.rows.astype(np.int32),
            tokens=np.where(self._state.limits[requests] == lengths, _STOP, requests).astype(np.int32),
            counts=counts,
            draft_counts=draft_counts,
            embeddings=[
                ev.RowEmbedding(row=row, generation=generation, values=bytes(4 * worker.hello.model.hidden_size))
                for row, generation in work.pooled
            ],
            completed_copies=[copy.copy_id for copy in copies],
            copied_blocks=copied,
            copy_s=(times.block_copy_s + times.block_overlap_s) * copied,
            copy_delay_s=times.block_copy_s * copied,
            idle_s=idle,
        )
        if self._watch is not None:
            self._watch(plan, answer)
        self._at(worker.is_answered_at, self._answer, answer)
        if worker.is_answered_at - self._now > _LONG_STEP_S:
            late_s = worker.is_answered_at - self._now + PING_INTERVAL_S
            self._feed(ev.WorkerCompiling(worker=plan.worker, epoch=plan.epoch, expected_s=late_s))

    def _verify(self, drafting: Drafting, work: Work) -> tuple[Numbers, Numbers]:
        """Return the numbers of verified and accepted drafts for each row that samples."""
        verified = np.zeros(len(work.rows), np.int64)
        accepted = verified.copy()
        for at in np.flatnonzero(work.most_drafts).tolist():
            number = int(work.requests[at])
            index = int(work.lengths[at]) - self._state.arrivals[number].spec.num_prompt_tokens - 1
            verified[at], accepted[at] = drafting.verify(number, index, int(work.most_drafts[at]))
        return verified, accepted

    def _answer(self, answer: ev.StepDone) -> None:
        if answer.worker in self._workers:
            self._feed(answer)


def _made_up(number: int, arrival: Arrival) -> Int32Array:
    """Return the tokens of a request: equal for equal block keys, and the request's number otherwise."""
    tokens = np.full(arrival.num_tokens, number, np.int32)
    size, count = arrival.block_size, len(arrival.keys) // KEY_BYTES
    if count and size:
        first = np.frombuffer(arrival.keys, np.uint8).reshape(count, KEY_BYTES)[:, :4].copy().view("<u4")[:, 0]
        # Use the upper half of the range, so that these tokens differ from all request numbers.
        tokens[: count * size] = np.repeat((first & 0x3FFFFFFF | 0x40000000).astype(np.int32), size)
    return tokens


def _moved(after: float | None, now: float) -> float | None:
    return None if after is None else now + after
