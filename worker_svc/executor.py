"""When the device computes: at once on a CPU, behind the host's back on CUDA.

A step is two functions: `forward` gives the logits, `sample` gives the tokens. An executor runs both and hands back a
step in flight, which becomes ready once the tokens are on the host. On CUDA nothing here waits for the device: the
tokens travel to pinned memory on a side stream, and `ready` only looks at an event.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from shared.columns import Int32Array

Forward = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampling gives, on the device."""

    tokens: torch.Tensor
    """`[S] int32`."""
    scores: torch.Tensor | None = None
    """`[n, m] int32`, see `worker_svc.scores`; None: no log-probabilities are wanted."""


Sample = Callable[[torch.Tensor], Sampled]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The same on the host."""

    tokens: Int32Array
    scores: Int32Array | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """When and for how long the device worked on a step."""

    started_unix_ns: int
    forward_ns: int
    sample_ns: int
    idle_before_ns: int

    @property
    def ended_unix_ns(self) -> int:
        """When the tokens were there."""
        return self.started_unix_ns + self.forward_ns + self.sample_ns


class StepInFlight(Protocol):
    """A step that the device works on or has finished."""

    def ready(self) -> bool:
        """Whether `result` would not wait."""
        ...

    def result(self) -> tuple[StepOutput, DeviceTimes]:
        """What was sampled and the times; waits for the device if it must."""
        ...


class Executor(Protocol):
    """Runs steps one after the other."""

    @property
    def asynchronous(self) -> bool:
        """Whether a step may be submitted while another is in flight, to the device's benefit."""
        ...

    def submit(self, forward: Forward, sample: Sample) -> StepInFlight:
        """Starts a step."""
        ...


def make_executor(device: torch.device) -> Executor:
    """The executor for this kind of device."""
    return CpuExecutor() if device.type == "cpu" else CudaExecutor(device)


@dataclass(frozen=True, slots=True)
class DoneStep:
    """A step whose tokens are there."""

    output: StepOutput
    times: DeviceTimes

    def ready(self) -> bool:
        """Always."""
        return True

    def result(self) -> tuple[StepOutput, DeviceTimes]:
        """See `StepInFlight.result`."""
        return self.output, self.times


class CpuExecutor:
    """Computes in the caller's thread; a submitted step is done."""

    asynchronous = False

    def __init__(self) -> None:
        self._ended_ns = 0

    def submit(self, forward: Forward, sample: Sample) -> DoneStep:
        """See `Executor.submit`."""
        started_unix_ns, started = time.time_ns(), time.perf_counter_ns()
        logits = forward()
        computed = time.perf_counter_ns()
        sampled = sample(logits)
        output = StepOutput(sampled.tokens.numpy(), None if sampled.scores is None else sampled.scores.numpy())
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


class CudaExecutor:
    """Enqueues on the current stream and copies the tokens out on a stream of its own."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._previous: CudaStep | None = None

    def submit(self, forward: Forward, sample: Sample) -> "CudaStep":
        """See `Executor.submit`."""
        started, computed, sampled, copied = _event(), _event(), _event(), _event()
        submitted_unix_ns = time.time_ns()
        started.record()
        logits = forward()
        computed.record()
        picked = sample(logits)
        sampled.record()
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(sampled)
            on_host = [self._to_host(tensor) for tensor in (picked.tokens, picked.scores) if tensor is not None]
            copied.record()
        step = CudaStep(on_host, submitted_unix_ns, (started, computed, sampled, copied), self._previous)
        self._previous = step
        return step

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in pinned memory, once the stream of copies gets there."""
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        on_host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._copies)
        return on_host


class CudaStep:
    """A step enqueued on CUDA. Results are taken in the order of submission."""

    def __init__(
        self,
        on_host: list[torch.Tensor],
        submitted_unix_ns: int,
        events: tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event, torch.cuda.Event],
        previous: "CudaStep | None",
    ) -> None:
        self._on_host = on_host
        self._submitted_unix_ns = submitted_unix_ns
        self._events = events
        self._previous = previous
        self._ended_unix_ns = 0

    def ready(self) -> bool:
        """See `StepInFlight.ready`."""
        done: bool = self._events[-1].query()  # type: ignore[no-untyped-call]
        return done

    def result(self) -> tuple[StepOutput, DeviceTimes]:
        """See `StepInFlight.result`."""
        started, computed, sampled, copied = self._events
        copied.synchronize()
        previous, self._previous = self._previous, None  # a step keeps only the one before it alive
        idle_ns, started_unix_ns = 0, self._submitted_unix_ns
        if previous is not None:
            idle_ns = _between(previous._events[2], started)
            # The device begins when it is told to, or when it is done with the step before.
            started_unix_ns = max(started_unix_ns, previous._ended_unix_ns)
        times = DeviceTimes(
            started_unix_ns=started_unix_ns,
            forward_ns=_between(started, computed),
            sample_ns=_between(computed, sampled),
            idle_before_ns=idle_ns,
        )
        self._ended_unix_ns = times.ended_unix_ns
        return StepOutput(*(tensor.numpy().astype(np.int32, copy=False) for tensor in self._on_host)), times


def _between(first: torch.cuda.Event, second: torch.cuda.Event) -> int:
    """Nanoseconds between two completed events."""
    milliseconds: float = first.elapsed_time(second)
    return max(0, round(milliseconds * 1e6))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
