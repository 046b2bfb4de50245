"""Quire's own core as an engine: the real state machine with its default settings, without sockets.

Step contents are derived from plans as a worker does. Prompt block keys are computed as a front end does.
"""

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from measure.policies.costs import Costs, Work
from measure.policies.engine import Ended, Engine, News, Step
from measure.policies.jobs import Job, first_token
from quire import __version__
from records.whatif.disk import DiskTimes, SimulatedDisk, StepClock
from records.whatif.rows import Admitted, Rows, Shape
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import EndReason, Peer
from scheduler_svc.core.lifecycle.statistics import ForecastStats
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.worker.hub import PING_INTERVAL_S
from shared.prefix_keys import following_keys, root_key
from shared.request_spec import RequestSpec

_FRONTEND = b"arena/1"
_FINGERPRINT = "arena"
_START_S = 1000.0
"""The core's time at the start of the run."""
_VOCAB = (1 << 31) - 1
_NATURAL = (EndReason.LENGTH,)


class QuireEngine(Engine):
    """Engine with one core for all workers."""

    def __init__(
        self,
        config: CoreConfig,
        costs: Costs,
        num_workers: int,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._cpu_clock = cpu_clock
        self.version = f"Quire {__version__}"
        self._core = Scheduler(config, 1 << 62)
        self._root = root_key(_FINGERPRINT, b"")
        self._block_size = costs.block_size
        self._costs = costs
        self._peers = {b"worker/%d" % number: number for number in range(num_workers)}
        self._names = list(self._peers)
        self._rows: list[Rows] = []
        disk_times = DiskTimes(read_s=costs.disk_block_s, write_s=costs.disk_block_s, latency_s=costs.disk_latency_s)
        self._disks = [SimulatedDisk(disk_times) for _ in self._names]
        # A worker whose copies stop the step is a CPU, which handles messages between steps.
        self._clocks = [None if costs.copies_overlap else StepClock() for _ in self._names]
        self._free_at = [0.0] * num_workers
        self._disk_events: list[tuple[float, int, Callable[[float], None]]] = []
        """Queue of orders of disk jobs, of their ends, and of their reports: the time, a number, and what happens."""
        self._num_disk_events = 0
        self._news = News()
        self._answers: dict[int, ev.StepDone] = {}
        self._num_steps = 0
        self._ticked_at = self._planned_at = 0.0
        self._num_prompt = np.zeros(64, np.int64)
        self._first_output = np.zeros(64, np.int64)
        self._handle(ev.FrontendJoined(frontend=_FRONTEND), 0.0)
        model = ev.ModelFacts(
            name="arena",
            architecture="arena",
            fingerprint=_FINGERPRINT,
            max_model_len=costs.max_model_len,
            vocab_size=_VOCAB,
            dtype="bfloat16",
            eos_token_ids=(),
        )
        for peer in self._names:
            hello = ev.WorkerHello(
                worker=peer,
                worker_id=peer.decode(),
                model=model,
                block_size=costs.block_size,
                num_blocks=costs.num_blocks,
                num_host_blocks=costs.num_host_blocks,
                num_disk_blocks=costs.num_disk_blocks,
                max_rows=costs.max_num_seqs,
                max_tokens_per_step=max(costs.max_num_batched_tokens, config.max_num_batched_tokens),
            )
            self._rows.append(Rows(hello))
            self._handle(hello, 0.0)

    def submit(self, number: int, job: Job, now: float) -> None:
        self._know(number, job)
        tokens = job.prompt_tokens()
        at = now + _START_S
        total_s = None
        if job.ttft_target_s is not None and job.tpot_target_s is not None:
            total_s = job.ttft_target_s + job.tpot_target_s * (job.num_outputs - 1)
        self._handle(
            ev.RequestArrived(
                frontend=_FRONTEND,
                stream=number,
                spec=RequestSpec(str(number), len(tokens), job.num_outputs, tenant=job.tenant, priority=job.priority),
                token_ids=tokens,
                credit=1 << 40,
                ttft_deadline=at + job.ttft_target_s if job.tells_targets and job.ttft_target_s is not None else None,
                total_deadline=at + total_s if job.tells_targets and total_s is not None else None,
                block_keys=following_keys(self._root, tokens.astype("<i4").tobytes(), self._block_size),
                block_size=self._block_size,
            ),
            now,
        )

    def due(self, now: float) -> Sequence[int]:
        while self._disk_events and self._disk_events[0][0] <= now:
            when, _, act = heapq.heappop(self._disk_events)
            act(when)
        if now >= self._ticked_at + PING_INTERVAL_S and not self._core.is_idle:
            self._ticked_at = now
            self._handle(ev.TimePassed(), now)
        self._planned_at = now
        began = self._cpu_clock()
        peers = self._core.due_workers(now + _START_S)
        self.cpu_s += self._cpu_clock() - began
        return [self._peers[peer] for peer in peers]

    def next_due(self, now: float) -> float | None:
        times = [self._disk_events[0][0]] if self._disk_events else []
        if not self._core.is_idle:
            times.append(max(now, self._ticked_at + PING_INTERVAL_S))
            due = self._core.next_plan_due(self._planned_at + _START_S)
            times += [] if due is None else [due - _START_S]
        return min(times, default=None)

    def next_step(self, worker: int, now: float) -> Step | None:
        began = self._cpu_clock()
        plan, effects = self._core.plan(self._names[worker], now + _START_S)
        if plan is not None:
            self._core.tidy()
        self.cpu_s += self._cpu_clock() - began
        self._receive(effects, now)
        if plan is None:
            return None
        step = self._step(worker, plan)
        clock = self._clocks[worker]
        if clock is not None:
            begin = max(now, self._free_at[worker])
            self._free_at[worker] = begin + self._costs.seconds(step.work)
            clock.add(begin, self._free_at[worker])
        return step

    def complete(self, step: Step, now: float, idle_s: float) -> None:
        answer = self._answers.pop(step.number)
        answer.idle_s = idle_s
        self._handle(answer, now)

    def take_news(self) -> News:
        news, self._news = self._news, News()
        return news

    def forecasts(self) -> Sequence[ForecastStats]:
        return self._core.stats().forecasts

    def hit_tokens(self) -> Mapping[str, int]:
        counters = [worker.counters for worker in self._core.stats().workers]
        return {
            "device": sum(each.cached_tokens for each in counters),
            "host": sum(each.restored_tokens for each in counters),
            "disk": sum(each.loaded_tokens for each in counters),
        }

    def _handle(self, event: ev.Event, now: float) -> None:
        began = self._cpu_clock()
        effects = self._core.handle(event, now + _START_S)
        self.cpu_s += self._cpu_clock() - began
        self._receive(effects, now)

    def _receive(self, effects: Sequence[ef.Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case ef.TokensReady():
                    self._news.tokens.extend(effect.each()[0].tolist())
                case ef.RequestEnded():
                    is_served = effect.reason in _NATURAL
                    self._news.ended.append(
                        Ended(
                            number=effect.stream,
                            num_outputs=effect.completion_tokens,
                            cached=effect.cached_prompt_tokens,
                            preemptions=effect.preemptions,
                            refusal="" if is_served else f"{effect.reason.value}: {effect.message}",
                        )
                    )
                case ef.WorkerWelcomed():
                    self._handle(ev.DiskReported(worker=effect.worker, epoch=effect.epoch, is_complete=True), now)
                case ef.DiskJobWanted():
                    self._at(self._boundary(effect.worker, now), partial(self._order, effect))
                case ef.WorkerRefused() | ef.WorkerUnknown():
                    raise AssertionError(f"the core declared a worker lost: {effect}")

    def _boundary(self, worker: Peer, now: float) -> float:
        """Return when a worker next handles messages."""
        clock = self._clocks[self._peers[worker]]
        return now if clock is None else clock.boundary(now)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        self._num_disk_events += 1
        heapq.heappush(self._disk_events, (when, self._num_disk_events, act))

    def _order(self, effect: ef.DiskJobWanted, now: float) -> None:
        self._disks[self._peers[effect.worker]].order(effect.job)
        self._start_disk(effect.worker, effect.epoch, now)

    def _start_disk(self, worker: Peer, epoch: int, now: float) -> None:
        started = self._disks[self._peers[worker]].start()
        if started is not None:
            job, seconds = started
            report = ev.DiskReported(worker=worker, epoch=epoch, copy_id=job.copy_id, seconds=seconds)
            self._at(now + seconds, partial(self._disk_ended, report))

    def _disk_ended(self, report: ev.DiskReported, now: float) -> None:
        disk = self._disks[self._peers[report.worker]]
        disk.ended()
        self._at(now + disk.latency_s, partial(self._send_report, report))
        self._start_disk(report.worker, report.epoch, now)

    def _send_report(self, report: ev.DiskReported, now: float) -> None:
        self._at(self._boundary(report.worker, now), partial(self._handle, report))

    def _step(self, worker: int, plan: Plan) -> Step:
        """Return the step that a worker computes for a plan."""
        rows = self._rows[worker]
        rows.leave(plan.leaves)
        rows.admit(
            [
                Admitted(
                    row=each.row,
                    generation=each.generation,
                    request=each.stream,
                    num_tokens=len(each.token_ids),
                    num_computed=each.num_computed_tokens,
                    samples=True,
                    num_blocks=len(each.blocks),
                )
                for each in plan.admissions
            ]
        )
        rows.grow(plan.append_rows)
        rows.hold(plan.holds, plan.releases)
        computed = rows.compute(plan.chunk_rows, plan.chunk_lengths)
        work = self._work(plan, computed.shape)
        copied = work.copied_out + work.copied_in
        copying_s = copied * self._costs.block_copy_s
        index = computed.lengths - self._num_prompt[computed.requests] - 1
        self._num_steps += 1
        self._answers[self._num_steps] = ev.StepDone(
            worker=plan.worker,
            epoch=plan.epoch,
            step=plan.step,
            rows=computed.rows.astype(np.int32),
            tokens=((self._first_output[computed.requests] + index) % (1 << 30)).astype(np.int32),
            completed_copies=[copy.copy_id for copy in (*plan.swap_outs, *plan.swap_ins)],
            copied_blocks=copied,
            copy_s=copying_s,
            copy_delay_s=self._costs.seconds(work) - self._costs.computing_s(work) if copied else 0.0,
        )
        return Step(worker=worker, number=self._num_steps, work=work)

    @staticmethod
    def _work(plan: Plan, shape: Shape) -> Work:
        """Return the work of a plan. A step waits for the copies of blocks that it reads or writes."""
        sources = [copy.sources for copy in plan.swap_outs]
        targets = [copy.targets for copy in plan.swap_ins]
        awaited = 0
        if sources or targets:
            used = np.concatenate([plan.append_blocks, *(each.blocks for each in plan.admissions)])
            awaited = int(np.isin(np.concatenate(sources + targets), used).sum())
        return Work(
            prefill=shape.prefill,
            decodes=shape.decodes,
            context=shape.context,
            prefill_context=shape.prefill_context,
            copied_out=sum(map(len, sources)),
            copied_in=sum(map(len, targets)),
            awaited=awaited,
        )

    def _know(self, number: int, job: Job) -> None:
        if number >= len(self._num_prompt):
            self._num_prompt = np.resize(self._num_prompt, 2 * number)
            self._first_output = np.resize(self._first_output, 2 * number)
        self._num_prompt[number] = job.num_prompt
        self._first_output[number] = first_token(job.outputs.name)
