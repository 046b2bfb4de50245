"""Choice between the Triton kernel and the CPU path, and recording of kernel launches, without importing triton.

An operation calls `runs_on_triton`. Three kinds of tensors go to the kernel:

* CUDA tensors;
* CPU tensors, if ``TRITON_INTERPRET=1`` was set before this module was imported (in tests);
* meta tensors inside `record_launches`, which records launches instead of executing them. `measure.kernels.aot`
  compiles recorded launches without a GPU. Meta tensors have no values, so recording also proves that an operation
  reads no value back to the host.

Only if a kernel will run does the operation import its kernels from `kernels.gpu`. They import triton, which takes
0.2 s and 75 MiB. A process without a GPU never imports triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

__all__ = [
    "HAVE_TRITON",
    "INTERPRETED",
    "Kernel",
    "Launch",
    "architecture",
    "next_power_of_2",
    "num_multiprocessors",
    "record_launches",
    "runs_on_triton",
]

HAVE_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class Launch:
    """A recorded launch: the kernel, its grid, arguments and options."""

    kernel: Kernel
    grid: Sequence[int]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Recording:
    """Recorded launches, and the GPU architecture for which they were recorded."""

    launches: list[Launch]
    architecture: int


_recording: ContextVar[_Recording | None] = ContextVar("kernel_launches", default=None)


class Kernel:
    """A kernel's entry point. The first launch with each combination of argument types compiles it."""

    def __init__(self, name: str, function: Any, varying: Sequence[str] = ()) -> None:
        self.name = name
        self.function = function
        """The function with Triton's decorator."""
        self.varying = frozenset(varying)
        """Names of the arguments whose values never cause another compilation."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            recording = _recording.get()
            if recording is None:
                self.function[grid](*args, **options)
            else:
                recording.launches.append(Launch(self, grid, args, options))

        return launch


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Return whether an operation on ``tensor`` uses the Triton kernel instead of the CPU path."""
    return HAVE_TRITON and (tensor.is_cuda or INTERPRETED or (tensor.is_meta and _recording.get() is not None))


@contextmanager
def record_launches(architecture: int = 90) -> Iterator[list[Launch]]:
    """Record this thread's launches in a list instead of executing them, while the context is active.

    Operations behave as on a GPU of compute capability ``architecture``.
    """
    recording = _Recording([], architecture)
    token = _recording.set(recording)
    try:
        yield recording.launches
    finally:
        _recording.reset(token)


def architecture(tensor: torch.Tensor) -> int:
    """Return the compute capability of the GPU that holds ``tensor`` (90 for sm_90), or 0 in the interpreter."""
    recording = _recording.get()
    if recording is not None:
        return recording.architecture
    return _architecture(tensor.device) if tensor.is_cuda else 0


def num_multiprocessors(tensor: torch.Tensor) -> int:
    """Return the number of multiprocessors on the GPU with ``tensor``; without a GPU, return an H100's number."""
    if _recording.get() is not None or not tensor.is_cuda:
        return 132
    return _num_multiprocessors(tensor.device)


# Both functions are called at every launch, and reading device properties takes longer than a launch.
@cache
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= ``n`` (``n >= 1``), as required for the sides of Triton tiles."""
    return 1 << (n - 1).bit_length()
