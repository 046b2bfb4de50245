"""The scheduler core, one model worker and a list of jobs, in virtual time and without faults.

A step takes `STEP_S`, plus `TOKEN_S` per token and `COPY_S` per copied block. That is about the speed of a small model
on one GPU, but only the proportions matter to the plots.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.scheduler import Scheduler
from shared.request_spec import RequestSpec

STEP_S = 0.008
TOKEN_S = 0.00004
COPY_S = 0.0002
TICK_S = 0.05
_START = 1000.0
_FRONTEND = b"front"
_PLENTY = 1 << 30


@dataclass(slots=True, eq=False)
class Job:
    """One request and its result; times in seconds since the start."""

    arrival: float
    prompt: list[int]
    output: int
    """Number of tokens to generate."""
    tenant: str = ""
    priority: int = 0
    hint: int = 0
    """The client's hint about its output; 0 for none."""
    wanted_s: float | None = None
    """Target for the last token, measured from the arrival."""
    started: float | None = None
    """Time of its first plan."""
    first_token: float | None = None
    end: float | None = None
    """Time of the last token; None if the request was refused."""
    preemptions: int = 0
    cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)

    @property
    def latency(self) -> float:
        """Time from its arrival to its last token."""
        assert self.end is not None
        return self.end - self.arrival

    @property
    def on_time(self) -> bool:
        """Whether it met its target."""
        return self.end is not None and self.wanted_s is not None and self.latency <= self.wanted_s


@dataclass(frozen=True, slots=True)
class Totals:
    """Statistics of the worker."""

    seconds: float
    """Time at which the last job ended."""
    computed_tokens: int


def run(
    config: CoreConfig, jobs: list[Job], *, num_blocks: int = 512, max_rows: int = 32, num_host_blocks: int = 0
) -> Totals:
    """Run the jobs in arrival order; write each result into its job."""
    core = Scheduler(config, 1)
    worker = ModelWorker(
        peer=b"worker",
        num_blocks=num_blocks,
        block_size=16,
        max_rows=max_rows,
        max_tokens_per_step=config.max_num_batched_tokens,
        num_host_blocks=num_host_blocks,
        copy_s=COPY_S,
    )
    core.handle(ev.FrontendJoined(frontend=_FRONTEND), _START)
    for effect in core.handle(worker.hello(), _START):
        if isinstance(effect, ef.WorkerWelcomed):
            worker.welcome(effect.epoch)
    agenda: list[tuple[float, int, ev.Event]] = []
    for stream, job in enumerate(jobs):
        agenda.append((_START + job.arrival, stream, _arrival(stream, job)))
    heapq.heapify(agenda)
    now = next_tick = busy_until = _START
    count, live, computed = len(jobs), len(jobs), 0
    while live:
        times = [next_tick, core.next_plan_due(now), agenda[0][0] if agenda else None]
        now = max(now, min(time for time in times if time is not None))
        effects: list[ef.Effect] = []
        while agenda and agenda[0][0] <= now:
            event = heapq.heappop(agenda)[2]
            if isinstance(event, ev.StepDone):
                worker.answered_step = event.step
            effects += core.handle(event, now)
        if now >= next_tick:
            next_tick = now + TICK_S
            effects += core.handle(ev.TimePassed(), now)
        while True:
            plan, found = core.plan(worker.peer, now)
            effects += found
            if plan is None:
                break
            answer = worker.execute(plan)
            for admission in plan.admissions:
                job = jobs[admission.stream]
                job.started = now - _START if job.started is None else job.started
            busy_until = max(now, busy_until) + STEP_S + TOKEN_S * plan.num_tokens + answer.copy_s
            computed += plan.num_tokens
            count += 1
            heapq.heappush(agenda, (busy_until, count, answer))
        live -= _note(effects, jobs, now - _START)
    return Totals(now - _START, computed)


def _arrival(stream: int, job: Job) -> ev.RequestArrived:
    return ev.RequestArrived(
        frontend=_FRONTEND,
        stream=stream,
        spec=RequestSpec(
            request_id=str(stream),
            num_prompt_tokens=len(job.prompt),
            max_tokens=job.output,
            tenant=job.tenant,
            priority=job.priority,
            expected_output_tokens=job.hint,
        ),
        token_ids=np.array(job.prompt, np.int32),
        credit=_PLENTY,
        total_deadline=None if job.wanted_s is None else _START + job.arrival + job.wanted_s,
    )


def _note(effects: list[ef.Effect], jobs: list[Job], now: float) -> int:
    """Record the effects; return the number of ended jobs."""
    ended = 0
    for effect in effects:
        if isinstance(effect, ef.TokensReady):
            for stream in effect.each()[0].tolist():
                job = jobs[stream]
                job.first_token = now if job.first_token is None else job.first_token
                job.token_times.append(now)
        elif isinstance(effect, ef.RequestEnded):
            job = jobs[effect.stream]
            job.end = now if effect.reason is EndReason.LENGTH else None
            job.preemptions, job.cached_tokens = effect.preemptions, effect.cached_prompt_tokens
            ended += 1
    return ended
