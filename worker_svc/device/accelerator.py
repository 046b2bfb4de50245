"""Interface to a GPU for everything except tensors: events, streams, pinned memory and captured graphs.

All work on the device is ordered through this interface. The logic above it (buffer reuse, capture, waiting) is plain
Python, and tests run it with a fake accelerator. The interface follows CUDA: work is enqueued on the current stream,
and an event marks a point in a stream.
"""

import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from shared.logging import get_logger


class Event(Protocol):
    """A point in a stream."""

    def record(self) -> None:
        """Record the event at the end of the current stream."""
        ...

    def query(self) -> bool:
        """Return whether the device has reached the event; True if it was never recorded."""
        ...

    def synchronize(self) -> None:
        """Block the host until the device has reached the event."""
        ...

    def ns_until(self, later: "Event") -> int:
        """Return the nanoseconds from this event to `later`; the device must have reached both."""
        ...


class Stream(Protocol):
    """A queue of work on the device."""

    def wait(self, event: Event) -> None:
        """Make work that is enqueued on this stream from now on wait for `event`."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this is the current stream."""
        ...


class Graph(Protocol):
    """Captured work that one call enqueues."""

    def replay(self) -> None:
        """Enqueue the captured work on the current stream; it reads and writes the tensors of the capture."""
        ...


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Graph, torch.Tensor]]
"""See `Accelerator.capture`."""


class Accelerator(Protocol):
    """An asynchronous device."""

    @property
    def device(self) -> torch.device:
        """The torch device of its tensors."""
        ...

    def event(self) -> Event: ...

    def stream(self) -> Stream: ...

    def wait(self, event: Event) -> None:
        """Make work that is enqueued on the current stream from now on wait for `event`."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned host memory, which the device can copy from and to asynchronously."""
        ...

    def pinned_exactly(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned host memory of exactly this size, filled with zeros; for large permanent blocks."""
        ...

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """Capture the work that `compute` enqueues. Its result must be contiguous.

        All graphs share one memory pool, so a result is valid until any graph of this device is captured or replayed.

        Returns:
            The graph, and the tensor that each replay writes its result to.

        Raises:
            RuntimeError: `compute` does what a capture does not allow, or the memory does not suffice.
        """
        ...

    def synchronize(self) -> None:
        """Block the host until the device has finished all work."""
        ...


class CudaEvent:
    """A CUDA event with timing."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self.event.record()

    def query(self) -> bool:
        passed: bool = self.event.query()  # type: ignore[no-untyped-call]
        return passed

    def synchronize(self) -> None:
        self.event.synchronize()

    def ns_until(self, later: "Event") -> int:
        milliseconds: float = self.event.elapsed_time(_cuda(later))
        return max(0, round(milliseconds * 1e6))


class CudaStream:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait(self, event: Event) -> None:
        self._stream.wait_event(_cuda(event))

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class CudaAccelerator:
    """One CUDA GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # Use one stream for all captures, because cuBLAS allocates tens of MiB of workspace per stream.
        self._capturing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def device(self) -> torch.device:
        return self._device

    def event(self) -> CudaEvent:
        return CudaEvent()

    def stream(self) -> CudaStream:
        return CudaStream(self._device)

    def wait(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(_cuda(event))

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def pinned_exactly(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Accelerator.pinned_exactly`. torch would round the size of its pinned memory up to a power of two."""
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.zeros(shape, dtype=dtype)
        memory = mmap.mmap(-1, size)
        tensor = torch.frombuffer(memory, dtype=dtype).view(shape)
        address, runtime = tensor.data_ptr(), torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(address, size, 0))
        if error:
            get_logger().warning("host memory not registered; using torch's pinned memory", cuda_error=error)
            return torch.zeros(shape, dtype=dtype, pin_memory=True)
        # The tensor keeps the mapping alive. The registration ends with the process.
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
        return tensor

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See `Accelerator.capture`.

        Runs `compute` once before the capture, because libraries allocate workspaces and Triton compiles on first use,
        which is not allowed during a capture. This run also fails if `compute` waits for the device, which would leave
        a capture unfinished.
        """
        self.synchronize()
        with torch.cuda.stream(self._capturing), _waiting_fails():
            compute()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # In mode "global", calls of other threads would fail the capture, such as NCCL's watchdog querying an event.
        capturing = torch.cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local")
        # Restore the stream, because `torch.cuda.graph` does not if the capture fails.
        with torch.cuda.stream(self._capturing), capturing:
            result = compute()
        return graph, _borrowed(result)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def make_accelerator(device: torch.device) -> CudaAccelerator | None:
    """Return the accelerator for `device`; None for a CPU, which computes in the caller's thread."""
    return CudaAccelerator(device) if device.type == "cuda" else None


@contextmanager
def _waiting_fails() -> Iterator[None]:
    """Make operations that wait for the device raise RuntimeError within the context."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class _Memory:
    """Memory of a tensor, which the tensor may release."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        place = (tensor.data_ptr(), False)
        self.__cuda_array_interface__ = {"version": 3, "typestr": "|u1", "shape": (size,), "data": place}


def _borrowed(result: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares the memory of a contiguous `result` without keeping it allocated.

    The next capture can then reuse the memory. Otherwise every graph would hold separate memory for its logits.
    """
    return torch.as_tensor(_Memory(result), device=result.device).view(result.dtype).view(result.shape)


def _cuda(event: Event) -> "torch.cuda.Event":
    if not isinstance(event, CudaEvent):
        raise TypeError(f"event: {type(event).__name__} is not a CudaEvent")
    return event.event
