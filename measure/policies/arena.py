"""The loop of the arena: jobs, devices and one engine in virtual time.

A turn first applies all events with the same time (new jobs, finished steps), then asks the engine for steps. A step
begins when its device has finished the previous step. Decisions take no virtual time; their CPU time is reported
separately. At the end of a step, results reach the engine and tokens reach the clients.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from measure.policies.costs import Costs
from measure.policies.engine import Engine, Step
from measure.policies.jobs import Job, SeenPrefixes
from scheduler_svc.core.lifecycle.statistics import ForecastStats

_MOST_IDLE_S = 3600.0
"""Virtual time without a step after which the remaining jobs are considered stuck."""


class ArenaError(ValueError):
    """A scheduler does not serve a workload correctly."""


class Workload(Protocol):
    """A run's jobs: some arrive independently, others follow the end of another job."""

    @property
    def name(self) -> str:
        """Name of the workload."""

    @property
    def load(self) -> float:
        """The workload's load: a fraction of a trace, a fraction of the capacity, or a number of users."""

    def first(self) -> Sequence[Job]:
        """Return the jobs whose arrival depends on no other job."""

    def following(self, job: Job, now: float) -> Sequence[Job]:
        """Return the jobs that the client sends after the end of `job`."""


@dataclass(slots=True, kw_only=True)
class Served:
    """How one job was served. Times are in seconds since the beginning of the run."""

    job: Job
    seen: int
    """Leading prompt tokens that an earlier job contained. No cache can find more."""
    tokens: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    ended: float = -1.0
    cached: int = 0
    preemptions: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Outcome of one run."""

    served: list[Served]
    duration_s: float
    """Time from the start to the last end."""
    busy_s: float
    """Time during which devices computed, summed over the devices."""
    arrivals_s: float
    """Time from the first arrival to the last one."""
    arrivals_busy_s: float
    """Part of `busy_s` before the last arrival."""
    num_workers: int
    steps: int
    cpu_s: float
    """CPU time for the scheduler's decisions."""
    version: str
    forecasts: Sequence[ForecastStats]
    """Accuracy of each kind of forecast."""
    hit_tokens: Mapping[str, int]
    """Cached tokens of all admitted sequences by tier."""


def run(engine: Engine, workload: Workload, costs: Costs, num_workers: int = 1) -> Run:
    """Serve a workload.

    Raises:
        ArenaError: the engine loses a job, serves it twice, or generates another number of tokens than asked for.
    """
    return _Arena(engine, workload, costs, num_workers).run()


class _Arena:
    def __init__(self, engine: Engine, workload: Workload, costs: Costs, num_workers: int) -> None:
        self._engine, self._workload, self._costs = engine, workload, costs
        self._served: list[Served] = []
        self._prefixes = SeenPrefixes()
        self._agenda: list[tuple[float, int, Job | tuple[Step, float]]] = []
        self._num_events = self._num_live = self._steps = 0
        self._now = self._last_step = self._busy_s = 0.0
        self._first_at: float | None = None
        self._arrivals_s = self._arrivals_busy_s = 0.0
        self._free_at = [0.0] * num_workers

    def run(self) -> Run:
        for job in self._workload.first():
            self._push(job.at, job)
        while self._agenda or self._num_live:
            self._turn()
        return Run(
            served=self._served,
            duration_s=max((each.ended for each in self._served), default=0.0),
            busy_s=self._busy_s,
            arrivals_s=self._arrivals_s,
            arrivals_busy_s=self._arrivals_busy_s,
            num_workers=len(self._free_at),
            steps=self._steps,
            cpu_s=self._engine.cpu_s,
            version=self._engine.version,
            forecasts=self._engine.forecasts(),
            hit_tokens=self._engine.hit_tokens(),
        )

    def _turn(self) -> None:
        due = self._engine.next_due(self._now)
        times = [*([self._agenda[0][0]] if self._agenda else []), *([due] if due is not None else [])]
        if not times or (self._num_live and not self._agenda and min(times) > self._last_step + _MOST_IDLE_S):
            waiting = [number for number, each in enumerate(self._served) if each.ended < 0]
            raise ArenaError(f"{self._engine.version}: {len(waiting)} jobs wait forever, for example job {waiting[0]}")
        self._now = max(self._now, min(times))
        while self._agenda and self._agenda[0][0] <= self._now:
            _, _, event = heapq.heappop(self._agenda)
            if isinstance(event, Job):
                self._send(event)
            else:
                self._engine.complete(event[0], self._now, event[1])
        for worker in self._engine.due(self._now):
            while (step := self._engine.next_step(worker, self._now)) is not None:
                self._execute(step)
        self._learn_news()

    def _push(self, when: float, event: Job | tuple[Step, float]) -> None:
        self._num_events += 1
        heapq.heappush(self._agenda, (when, self._num_events, event))

    def _send(self, job: Job) -> None:
        number = len(self._served)
        self._served.append(Served(job=job, seen=self._prefixes.add(job.prompt)))
        self._num_live += 1
        self._last_step = self._now
        if self._first_at is None:
            self._first_at = self._now
        self._arrivals_s = self._now - self._first_at
        self._arrivals_busy_s = self._busy_s - sum(max(0.0, free_at - self._now) for free_at in self._free_at)
        self._engine.submit(number, job, self._now)

    def _execute(self, step: Step) -> None:
        begin = max(self._now, self._free_at[step.worker])
        seconds = self._costs.seconds(step.work)
        idle_s = begin - self._free_at[step.worker] if self._free_at[step.worker] else 0.0
        self._free_at[step.worker] = begin + seconds
        self._busy_s += seconds
        self._steps += seconds > 0
        self._last_step = begin + seconds
        self._push(begin + seconds, (step, idle_s))

    def _learn_news(self) -> None:
        news = self._engine.take_news()
        for number in news.tokens:
            self._served[number].tokens.append(self._now)
        for end in news.ended:
            served = self._served[end.number]
            job = served.job
            if served.ended >= 0:
                raise ArenaError(f"{self._engine.version}: job {end.number} ended twice")
            served.ended, served.cached, served.preemptions = self._now, end.cached, end.preemptions
            served.refusal = end.refusal
            if not end.refusal and not end.num_outputs == len(served.tokens) == job.num_outputs:
                raise ArenaError(
                    f"{self._engine.version}: job {end.number} generated {end.num_outputs} tokens, of which"
                    f" {len(served.tokens)} arrived; {job.num_outputs} were requested"
                )
            self._num_live -= 1
            self._prefixes.add((*job.prompt, job.outputs))
            for each in self._workload.following(job, self._now):
                self._push(each.at, each)
