"""A simulated accelerator: it computes at once on the CPU, but the host is notified late.

An event has passed once the host has waited for it, or once `lag` further events were recorded. A graph recomputes what
was captured, into the capture's tensor. Every operation is recorded in `log`, so that a test can see what the host did
and in which order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from worker_svc.device.accelerator import Event, Graph


class FakeEvent:
    """An event of `FakeAccelerator`."""

    def __init__(self, owner: "FakeAccelerator", number: int) -> None:
        self._owner = owner
        self.number = number
        self.recorded_at: int | None = None

    def record(self) -> None:
        """See `Event.record`."""
        self._owner.recorded += 1
        self.recorded_at = self._owner.recorded
        self._owner.log.append(f"record {self.number}")

    def query(self) -> bool:
        """See `Event.query`."""
        at = self.recorded_at
        return at is None or at <= self._owner.passed or at + self._owner.lag <= self._owner.recorded

    def synchronize(self) -> None:
        """See `Event.synchronize`."""
        self._owner.log.append(f"wait {self.number}" if not self.query() else f"pass {self.number}")
        if self.recorded_at is not None:
            self._owner.passed = max(self._owner.passed, self.recorded_at)

    def ns_until(self, later: Event) -> int:
        """See `Event.ns_until`; both must have passed."""
        assert isinstance(later, FakeEvent)
        assert self.query(), f"event {self.number} has not passed"
        assert later.query(), f"event {later.number} has not passed"
        assert self.recorded_at is not None
        assert later.recorded_at is not None
        return 1000 * (later.recorded_at - self.recorded_at)


class FakeStream:
    """A stream of `FakeAccelerator`."""

    def __init__(self, owner: "FakeAccelerator", number: int) -> None:
        self._owner = owner
        self._number = number

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        assert isinstance(event, FakeEvent)
        self._owner.log.append(f"stream {self._number} waits {event.number}")

    def current(self) -> AbstractContextManager[object]:
        """See `Stream.current`."""
        self._owner.log.append(f"stream {self._number}")
        return nullcontext()


class FakeGraph:
    """A graph of `FakeAccelerator`."""

    def __init__(self, owner: "FakeAccelerator", compute: Callable[[], torch.Tensor], result: torch.Tensor) -> None:
        self._owner = owner
        self._compute = compute
        self._result = result

    def replay(self) -> None:
        """See `Graph.replay`."""
        self._owner.log.append(f"replay {len(self._result)}")
        self._result.copy_(self._compute())


class FakeAccelerator:
    """See the module."""

    def __init__(self, lag: int = 1000) -> None:
        self.log: list[str] = []
        self.lag = lag
        self.recorded = 0
        self.passed = 0
        self._made = 0

    @property
    def device(self) -> torch.device:
        """See `Accelerator.device`."""
        return torch.device("cpu")

    def event(self) -> FakeEvent:
        """See `Accelerator.event`."""
        self._made += 1
        return FakeEvent(self, self._made)

    def stream(self) -> FakeStream:
        """See `Accelerator.stream`."""
        self._made += 1
        return FakeStream(self, self._made)

    def wait(self, event: Event) -> None:
        """See `Accelerator.wait`."""
        assert isinstance(event, FakeEvent)
        self.log.append(f"waits {event.number}")

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Accelerator.pinned`."""
        return torch.empty(shape, dtype=dtype)

    def pinned_exactly(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Accelerator.pinned_exactly`."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, compute: Callable[[], torch.Tensor]) -> tuple[Graph, torch.Tensor]:
        """See `Accelerator.capture`."""
        result = compute().clone()
        self.log.append(f"capture {len(result)}")
        return FakeGraph(self, compute, result), result

    def synchronize(self) -> None:
        """See `Accelerator.synchronize`."""
        self.passed = self.recorded
        self.log.append("synchronize")
