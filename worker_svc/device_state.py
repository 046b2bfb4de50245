"""State of the rows that lives on the device, and how it follows the host: by differences.

All of it is one flat int32 tensor; block tables, lanes and lengths are views of it. The host notes which words change
while it applies a plan; `publish` sends them as one copy from pinned memory, and one kernel puts them where they
belong. A step that changes nothing sends nothing.

Pinned memory is used by turns: a copy reads it some time after the host has gone on, so a buffer is written again only
after the event behind its last copy has passed. With two buffers and two steps in flight the host never really waits.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kernels.scatter import scatter_words
from worker_svc.accelerator import Accelerator, Event

IntArray = npt.NDArray[np.int64]

_BUFFERS = 2
_FIRST_WORDS = 4096
"""Changes that a staging buffer holds at first; one that is too small is replaced by one of twice the need."""


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer and the event behind the last copy out of it."""

    words: torch.Tensor
    copied: Event


class Staging:
    """Copies small arrays to the device without waiting for it."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._buffers = [_Buffer(self._pinned(_FIRST_WORDS), accelerator.event()) for _ in range(_BUFFERS)]
        self._turn = 0

    def send(self, array: npt.NDArray[np.int32]) -> torch.Tensor:
        """A copy of `array` on the device, int32 with its shape; `array` may be changed afterwards."""
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
    """The flat tensor and what is about to change in it."""

    def __init__(self, accelerator: Accelerator, max_words: int) -> None:
        """`max_words` is the size of all columns together."""
        self._staging = Staging(accelerator)
        self._words = torch.zeros(max_words, dtype=torch.int32, device=accelerator.device)
        self._used = 0
        self._places: list[IntArray] = []
        self._values: list[npt.NDArray[np.int32]] = []

    def column(self, *shape: int) -> tuple[torch.Tensor, int]:
        """A new part of the state: the tensor `shape` int32, zeros, and the place of its first word.

        Raises:
            ValueError: more than `max_words` in all.
        """
        first, size = self._used, int(np.prod(shape))
        if first + size > len(self._words):
            raise ValueError(f"{first + size} words of state in {len(self._words)}")
        self._used += size
        return self._words[first : first + size].view(shape), first

    def change(self, places: IntArray, values: npt.NDArray[np.int32]) -> None:
        """Notes that the words at `places` are to become `values`; no place twice before `publish`."""
        self._places.append(places)
        self._values.append(values)

    def publish(self) -> None:
        """Enqueues the changes noted since the last call."""
        if not self._places:
            return
        changes = np.stack((np.concatenate(self._places), np.concatenate(self._values))).astype(np.int32, copy=False)
        self.forget()
        scatter_words(self._words, self._staging.send(changes))

    def forget(self) -> None:
        """Drops the changes noted since the last `publish`."""
        self._places.clear()
        self._values.clear()
