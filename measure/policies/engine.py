"""Engine: a scheduler as the arena drives it. An engine owns one or several workers and decides what they compute."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from measure.policies.costs import Work
from measure.policies.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that a worker computes."""

    worker: int
    number: int
    """Number among the steps of its engine."""
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
    """Why the scheduler did not serve the job; empty: the job was served."""


@dataclass(slots=True)
class News:
    """Events since the last call."""

    tokens: list[int] = field(default_factory=list)
    """Numbers of the jobs that got a token, once per token."""
    ended: list[Ended] = field(default_factory=list)


class Engine(ABC):
    """A scheduler with its workers; times in seconds since the beginning of the run."""

    version: str
    """Name and version of the scheduler."""
    cpu_s: float = 0.0
    """CPU time of all decisions so far, on this machine."""

    @abstractmethod
    def submit(self, number: int, job: Job, now: float) -> None:
        """Add a job; `number` names it from now on."""

    @abstractmethod
    def due(self, now: float) -> Sequence[int]:
        """Return the workers that may get a step now."""

    @abstractmethod
    def next_due(self, now: float) -> float | None:
        """Return the next time at which a worker may get a step, or a decision is due, without any other event."""

    @abstractmethod
    def next_step(self, worker: int, now: float) -> Step | None:
        """Return the next step of a worker; None: nothing to do, or enough steps are in flight."""

    @abstractmethod
    def complete(self, step: Step, now: float, idle_s: float) -> None:
        """Apply the results of a step; its device was idle for `idle_s` before it."""

    @abstractmethod
    def take_news(self) -> News:
        """Return what has happened since the last call."""

    def close(self) -> None:
        """Release everything that the engine holds."""
        return
