"""Executors: run the steps, synchronously on a CPU and asynchronously on an accelerator.

A step is two functions: `forward` returns logits, and hidden states for rows that pool; `sample` returns tokens and
embeddings. An executor runs both and returns a step in flight, which is ready when its results are on the host. On an
accelerator, the host does not wait for the device: a separate stream copies the results to pinned memory, and `ready`
queries an event.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from worker_svc.device.accelerator import Accelerator, Event
from worker_svc.interface.arrays import FloatArray, Int32Array


@dataclass(frozen=True, slots=True)
class Computed:
    """Result of the forward pass, on the device."""

    logits: torch.Tensor
    """`[S + P, vocab_size]`."""
    hidden: torch.Tensor | None = None
    """`[H, hidden_size]`; None if no row pools."""


Forward = Callable[[], Computed]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of sampling, on the device."""

    tokens: torch.Tensor
    """`[S] int32`."""
    scores: torch.Tensor | None = None
    """`[n, m] int32`, see `worker_svc.outputs.scores`; None if no row needs log-probabilities."""
    embeddings: torch.Tensor | None = None
    """`[E, hidden_size] float32`; None if no embedding is complete."""


Sample = Callable[[Computed], Sampled]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The same result on the host."""

    tokens: Int32Array
    scores: Int32Array | None = None
    embeddings: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """Times of a step on the device."""

    started_unix_ns: int
    forward_ns: int
    sample_ns: int
    idle_before_ns: int

    @property
    def ended_unix_ns(self) -> int:
        """End of sampling."""
        return self.started_unix_ns + self.forward_ns + self.sample_ns


class StepInFlight(Protocol):
    """A step that the device computes or has finished."""

    def ready(self) -> bool:
        """Return whether `result` would not wait."""
        ...

    def tokens(self) -> Int32Array:
        """Return the sampled tokens; wait for the device if necessary."""
        ...

    def ns_until(self, event: Event) -> int:
        """Return the ns from the end of the step to `event`, 0 if it is earlier; the device must have reached both."""
        ...

    def result(self) -> tuple[StepOutput, DeviceTimes]:
        """Return the sampled tokens and the times; wait for the device if necessary."""
        ...


class Executor(Protocol):
    """Runner of steps, one after the other."""

    @property
    def asynchronous(self) -> bool:
        """Whether to submit a step while another is in flight, to keep the device busy."""
        ...

    def submit(self, forward: Forward, sample: Sample) -> StepInFlight:
        """Start a step."""
        ...


def make_executor(accelerator: Accelerator | None) -> Executor:
    """Return an accelerator's executor; None for the CPU."""
    return CpuExecutor() if accelerator is None else AsyncExecutor(accelerator)


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A finished step."""

    output: StepOutput
    times: DeviceTimes

    def ready(self) -> bool:
        """Return True."""
        return True

    def tokens(self) -> Int32Array:
        """See `StepInFlight.tokens`."""
        return self.output.tokens

    def ns_until(self, event: Event) -> int:
        """Return 0, because the step has not run on a device."""
        return 0

    def result(self) -> tuple[StepOutput, DeviceTimes]:
        """See `StepInFlight.result`."""
        return self.output, self.times


class CpuExecutor:
    """Executor that computes in the caller's thread; `submit` returns a finished step."""

    asynchronous = False

    def __init__(self) -> None:
        self._ended_ns = 0

    def submit(self, forward: Forward, sample: Sample) -> DoneStep:
        started_unix_ns, started = time.time_ns(), time.perf_counter_ns()
        outputs = forward()
        computed = time.perf_counter_ns()
        sampled = sample(outputs)
        output = StepOutput(
            sampled.tokens.numpy(),
            None if sampled.scores is None else sampled.scores.numpy(),
            None if sampled.embeddings is None else sampled.embeddings.numpy(),
        )
        ended = time.perf_counter_ns()
        idle_ns = started - self._ended_ns if self._ended_ns else 0
        self._ended_ns = ended
        return DoneStep(
            output,
            DeviceTimes(
                started_unix_ns=started_unix_ns,
                forward_ns=computed - started,
                sample_ns=ended - computed,
                idle_before_ns=idle_ns,
            ),
        )


class AsyncExecutor:
    """Executor that enqueues steps on the current stream, and copies results on its own stream."""

    asynchronous = True

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._copies = accelerator.stream()
        self._previous: EnqueuedStep | None = None

    def submit(self, forward: Forward, sample: Sample) -> "EnqueuedStep":
        started, computed, sampled, copied = (self._accelerator.event() for _ in range(4))
        submitted_unix_ns = time.time_ns()
        started.record()
        outputs = forward()
        computed.record()
        picked = sample(outputs)
        sampled.record()
        on_host = Sampled(
            self._pinned(picked.tokens),
            None if picked.scores is None else self._pinned(picked.scores),
            None if picked.embeddings is None else self._pinned(picked.embeddings),
        )
        with self._copies.current():
            self._copies.wait(sampled)
            for target, source in (
                (on_host.tokens, picked.tokens),
                (on_host.scores, picked.scores),
                (on_host.embeddings, picked.embeddings),
            ):
                if target is not None and source is not None:
                    target.copy_(source, non_blocking=True)
            copied.record()
        step = EnqueuedStep(on_host, picked, submitted_unix_ns, (started, computed, sampled, copied), self._previous)
        self._previous = step
        return step

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate pinned memory for a copy."""
        return self._accelerator.pinned(tuple(tensor.shape), tensor.dtype)


class EnqueuedStep:
    """A step that a device computes asynchronously. Results must be taken in the order of submission."""

    def __init__(
        self,
        on_host: Sampled,
        on_device: Sampled,
        submitted_unix_ns: int,
        events: tuple[Event, Event, Event, Event],
        previous: "EnqueuedStep | None",
    ) -> None:
        self._on_host = on_host
        # Hold references, so that the memory is not reused during the copy.
        self._on_device: Sampled | None = on_device
        self._submitted_unix_ns = submitted_unix_ns
        self._events = events
        self._previous = previous
        self._ended_unix_ns = 0

    def ready(self) -> bool:
        """See `StepInFlight.ready`."""
        return self._events[-1].query()

    def tokens(self) -> Int32Array:
        """See `StepInFlight.tokens`."""
        self._events[-1].synchronize()
        tokens: Int32Array = self._on_host.tokens.numpy()
        return tokens

    def ns_until(self, event: Event) -> int:
        """See `StepInFlight.ns_until`."""
        return max(0, self._events[2].ns_until(event))

    def result(self) -> tuple[StepOutput, DeviceTimes]:
        """See `StepInFlight.result`."""
        started, computed, sampled, copied = self._events
        copied.synchronize()
        self._on_device = None
        previous, self._previous = self._previous, None  # A step keeps only its direct predecessor alive.
        idle_ns, started_unix_ns = 0, self._submitted_unix_ns
        if previous is not None:
            idle_ns = previous._events[2].ns_until(started)
            # The device starts the step when it is submitted, or when the previous step ends.
            started_unix_ns = max(started_unix_ns, previous._ended_unix_ns)
        times = DeviceTimes(
            started_unix_ns=started_unix_ns,
            forward_ns=started.ns_until(computed),
            sample_ns=computed.ns_until(sampled),
            idle_before_ns=idle_ns,
        )
        self._ended_unix_ns = times.ended_unix_ns
        on_host = self._on_host
        output = StepOutput(
            on_host.tokens.numpy(),
            None if on_host.scores is None else on_host.scores.numpy(),
            None if on_host.embeddings is None else on_host.embeddings.numpy(),
        )
        return output, times
