"""What the worker uses of a GPU besides tensors: events, streams, pinned memory, captured graphs.

Everything that orders work on the device goes through this small interface, so that the logic above it (which buffer
may be written again, what is captured, what waits for what) is plain Python that runs against a stand-in as well. The
interface is CUDA's own model: work is enqueued on the current stream, an event marks a point in a stream.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Puts it at the present end of the current stream."""
        ...

    def query(self) -> bool:
        """Whether the device has passed it, or it was never recorded."""
        ...

    def synchronize(self) -> None:
        """Waits on the host until the device has passed it."""
        ...

    def ns_until(self, later: "Event") -> int:
        """Nanoseconds from here to another event; the device has passed both."""
        ...


class Stream(Protocol):
    """A queue of work beside the current one."""

    def wait(self, event: Event) -> None:
        """Lets what is enqueued here from now on begin after `event`."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Makes it the current stream while the context lasts."""
        ...


class Graph(Protocol):
    """Work that was captured once and is enqueued by one call."""

    def replay(self) -> None:
        """Enqueues it on the current stream; it reads and writes the tensors it was captured with."""
        ...


class Accelerator(Protocol):
    """An asynchronous device."""

    @property
    def device(self) -> torch.device:
        """Where its tensors live."""
        ...

    def event(self) -> Event:
        """A new event."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def wait(self, event: Event) -> None:
        """Lets what is enqueued on the current stream from now on begin after `event`."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device copies from and to without the host waiting."""
        ...

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """The graph of what `compute` enqueues, and the tensor that each replay writes its result to.

        All graphs share one memory pool, so a result lasts until any graph of this device is replayed.
        """
        ...

    def synchronize(self) -> None:
        """Waits on the host until the device has nothing left to do."""
        ...


class CudaEvent:
    """An event of CUDA that keeps the time."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """See `Event.record`."""
        self.event.record()

    def query(self) -> bool:
        """See `Event.query`."""
        passed: bool = self.event.query()  # type: ignore[no-untyped-call]
        return passed

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self.event.synchronize()

    def ns_until(self, later: "Event") -> int:
        """See `Event.ns_until`."""
        milliseconds: float = self.event.elapsed_time(_cuda(later))
        return max(0, round(milliseconds * 1e6))


class CudaStream:
    """A stream of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        self._stream.wait_event(_cuda(event))

    def current(self) -> AbstractContextManager[object]:
        """See `Stream.current`."""
        return torch.cuda.stream(self._stream)


class CudaAccelerator:
    """One GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures: cuBLAS keeps a workspace of tens of MiB for every stream that it has seen.
        self._capturing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        """See `Accelerator.device`."""
        return self._device

    def event(self) -> CudaEvent:
        """See `Accelerator.event`."""
        return CudaEvent()

    def stream(self) -> CudaStream:
        """See `Accelerator.stream`."""
        return CudaStream(self._device)

    def wait(self, event: Event) -> None:
        """See `Accelerator.wait`."""
        torch.cuda.current_stream(self._device).wait_event(_cuda(event))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Accelerator.pinned`."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See `Accelerator.capture`. Runs `compute` once beforehand: libraries make their workspaces and Triton
        compiles on first use, neither of which may happen within a capture."""
        self.synchronize()
        with torch.cuda.stream(self._capturing):
            compute()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capturing):
            result = compute()
        return graph, result

    def synchronize(self) -> None:
        """See `Accelerator.synchronize`."""
        torch.cuda.synchronize(self._device)


def make_accelerator(device: torch.device) -> CudaAccelerator | None:
    """What orders the work on `device`; None for a CPU, which computes in the caller's thread."""
    return CudaAccelerator(device) if device.type == "cuda" else None


def _cuda(event: Event) -> "torch.cuda.Event":
    if not isinstance(event, CudaEvent):
        raise TypeError(f"{type(event).__name__} is no event of CUDA")
    return event.event
