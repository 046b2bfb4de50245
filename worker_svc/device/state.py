"""Row state on the device, which the host updates incrementally.

The state is one flat int32 tensor; block tables, lanes and lengths are views of it. The host collects the changed words
while it applies a plan. `publish` sends them with one copy from pinned memory, and one kernel scatters them into the
tensor. A step without changes sends nothing.

The copy reads pinned memory asynchronously. Two buffers are therefore used in turn, and a buffer is rewritten only
after the event of its last copy. With two steps in flight, the host rarely waits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.scatter import scatter_words
from worker_svc.device.accelerator import Accelerator, Event
from worker_svc.interface.arrays import IntArray

_BUFFERS = 2
_FIRST_WORDS = 4096
"""Initial size of a staging buffer in words. A buffer that is too small is replaced by one with twice the needed size.
"""


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer and the event after its last copy."""

    words: torch.Tensor
    copied: Event


class Staging:
    """Asynchronous copies of small arrays to the device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers = [_Buffer(self._pinned(_FIRST_WORDS), accelerator.event()) for _ in range(_BUFFERS)]
        self._turn = 0

    def send(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """Copy `array` to the device as int32; the caller may change `array` afterwards."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.copied.synchronize()
        if array.size > len(buffer.words):
            buffer.words = self._pinned(2 * array.size)
        words = buffer.words[: array.size]
        words.copy_(torch.from_numpy(np.ascontiguousarray(array)).view(-1))
        sent = words.to(self._accelerator.device, non_blocking=True, copy=True)
        buffer.copied.record()
        return sent.view(array.shape)

    def _pinned(self, num_words: int) -> torch.Tensor:
        return self._accelerator.pinned((num_words,), torch.int32)


class DeviceState:
    """Flat state tensor on the device, and its pending changes."""

    def __init__(self, accelerator: Accelerator, max_words: int) -> None:
        """Allocate the tensor; `max_words` is the total size of all columns."""
        self._staging = Staging(accelerator)
        self._words = torch.zeros(max_words, dtype=torch.int32, device=accelerator.device)
        self._used = 0
        self._places: list[IntArray] = []
        self._values: list[npt.NDArray[np.int32]] = []

    def column(self, *shape: int) -> tuple[torch.Tensor, int]:
        """Allocate a part of the state: an int32 tensor of zeros of this shape, and the place of its first word.

        Raises:
            ValueError: the columns exceed `max_words`.
        """
        first, size = self._used, int(np.prod(shape))
        if first + size > len(self._words):
            raise ValueError(f"device state: {first + size} words exceed the capacity of {len(self._words)}")
        self._used += size
        return self._words[first : first + size].view(shape), first

    def change(self, places: IntArray, values: npt.NDArray[np.int32]) -> None:
        """Set the words at `places` to `values` with the next `publish`; no place may occur twice."""
        self._places.append(places)
        self._values.append(values)

    def publish(self) -> None:
        """Enqueue the changes since the last call."""
        if not self._places:
            return
        changes = np.stack((np.concatenate(self._places), np.concatenate(self._values))).astype(np.int32, copy=False)
        self.forget()
        scatter_words(self._words, self._staging.send(changes))

    def forget(self) -> None:
        """Drop the changes since the last `publish`."""
        self._places.clear()
        self._values.clear()
