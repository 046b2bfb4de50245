"""Engine: the interface through which the arena drives a scheduler.

An engine owns one or more workers and plans their steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from measure.policies.costs import Work
from measure.policies.jobs import Job
from scheduler_svc.core.lifecycle.statistics import ForecastStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that a worker computes."""

    worker: int
    number: int
    """Step number within its engine."""
    work: Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a job."""

    number: int
    num_outputs: int
    """Tokens that were generated."""
    cached: int
    """Prompt tokens that were found in the prefix cache."""
    preemptions: int
    refusal: str = ""
    """Why the scheduler refused the job; empty if the job was served."""


@dataclass(slots=True)
class News:
    """Events since the last call."""

    tokens: list[int] = field(default_factory=list)
    """Job numbers, once per generated token."""
    ended: list[Ended] = field(default_factory=list)


class Engine(ABC):
    """A scheduler with its workers; times in seconds since the beginning of the run."""

    version: str
    """Name and version of the scheduler."""
    cpu_s: float = 0.0
    """CPU time for all decisions so far, on this machine."""

    @abstractmethod
    def submit(self, number: int, job: Job, now: float) -> None:
        """Add a job, identified by `number` from now on."""

    @abstractmethod
    def due(self, now: float) -> Sequence[int]:
        """Return the workers that can accept a step now."""

    @abstractmethod
    def next_due(self, now: float) -> float | None:
        """Return the next time at which a worker can accept a step, or a decision is due, if no other event happens."""

    @abstractmethod
    def next_step(self, worker: int, now: float) -> Step | None:
        """Return the next step for a worker; None if there is nothing to do or enough steps are in flight."""

    @abstractmethod
    def complete(self, step: Step, now: float, idle_s: float) -> None:
        """Apply the results of a step. Its device was idle for `idle_s` before the step."""

    def forecasts(self) -> Sequence[ForecastStats]:
        """Return each forecast kind's accuracy; empty if the scheduler makes no forecasts."""
        return ()

    def hit_tokens(self) -> Mapping[str, int]:
        """Return the cached tokens of all admitted sequences by tier; empty if the scheduler does not count them."""
        return {}

    @abstractmethod
    def take_news(self) -> News:
        """Return and clear the events since the last call."""

    def close(self) -> None:
        """Release everything that the engine holds."""
        return
