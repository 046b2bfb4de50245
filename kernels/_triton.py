"""The one place that knows whether triton is installed, and the only way a kernel is launched.

Kernels are written at the top level of their module with what this one exports: ``@kernel`` makes an entry
point that is launched as ``kernel[grid](*args, **options)`` (``@kernel_with`` one with arguments that vary), ``@jit`` a
device function that kernels call.
Where triton is missing all are stand-ins that let the modules be imported (the bodies never run then), so
that the CPU paths work.

An operation asks `runs_on_triton` which way to go. Three kinds of tensors go to the kernel: CUDA tensors; CPU
tensors when ``TRITON_INTERPRET=1`` was set before triton was imported (tests); and meta tensors inside
`record_launches`, which notes the launches instead of making them. What is recorded is what would have run,
so `kernels.aot` compiles it without a GPU; and because a meta tensor has no values, recording an operation
also shows that it never reads one back to the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl

    HAVE_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAVE_TRITON = True
    except ImportError:
        HAVE_TRITON = False

        class tl:  # noqa: N801 - stands in for the module; annotations are strings and look nothing up
            pass


__all__ = [
    "HAVE_TRITON",
    "INTERPRETED",
    "Kernel",
    "Launch",
    "architecture",
    "jit",
    "kernel",
    "kernel_with",
    "next_power_of_2",
    "num_multiprocessors",
    "record_launches",
    "runs_on_triton",
    "tl",
    "triton",
]

INTERPRETED = HAVE_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: the kernel and everything it would have been launched with."""

    kernel: Kernel
    grid: Sequence[int]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Recording:
    """The launches noted so far, and the GPU they are meant for."""

    launches: list[Launch]
    architecture: int


_recording: ContextVar[_Recording | None] = ContextVar("kernel_launches", default=None)


class Kernel:
    """An entry point: compiled for its arguments' types when first launched, then enqueued on the current
    stream."""

    def __init__(self, function: Callable[..., None], varying: Sequence[str] = ()) -> None:
        self.name: str = function.__name__.strip("_")
        self.varying = frozenset(varying)
        """Arguments by whose values nothing is compiled anew."""
        names = list(varying)
        self.function: Any = (
            triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names) if HAVE_TRITON else None
        )

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            recording = _recording.get()
            if recording is None:
                self.function[grid](*args, **options)
            else:
                recording.launches.append(Launch(self, grid, args, options))

        return launch


def kernel(function: Callable[..., None]) -> Kernel:
    """Make ``function`` an entry point."""
    return Kernel(function)


def kernel_with(*, varying: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Make a function an entry point that is compiled once, whatever the values of the arguments named.

    Triton compiles a kernel anew for an integer that is 1, one divisible by 16, and any other; and for a pointer that
    is aligned to 16 bytes and one that is not. What changes from step to step (numbers of rows, pointers into the
    midst of a packed upload) is named here: otherwise a step that serves people would wait for the compiler.
    """
    return lambda function: Kernel(function, varying)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function`` a device function, callable from kernels only."""
    compiled: Callable[..., Any] = triton.jit(function) if HAVE_TRITON else function
    return compiled


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` belongs to the Triton kernel rather than the CPU path."""
    return HAVE_TRITON and (tensor.is_cuda or INTERPRETED or (tensor.is_meta and _recording.get() is not None))


@contextmanager
def record_launches(architecture: int = 90) -> Iterator[list[Launch]]:
    """Within the block, kernels launched by this thread are appended to the list and not run; operations choose what
    to launch as on a GPU of this compute capability."""
    recording = _Recording([], architecture)
    token = _recording.set(recording)
    try:
        yield recording.launches
    finally:
        _recording.reset(token)


def architecture(tensor: torch.Tensor) -> int:
    """The compute capability that kernels on ``tensor`` run on, 90 for sm_90; 0 in the interpreter."""
    recording = _recording.get()
    if recording is not None:
        return recording.architecture
    return _architecture(tensor.device) if tensor.is_cuda else 0


def num_multiprocessors(tensor: torch.Tensor) -> int:
    """Multiprocessors of the GPU that kernels on ``tensor`` run on; without one those of an H100."""
    if _recording.get() is not None or not tensor.is_cuda:
        return 132
    return _num_multiprocessors(tensor.device)


# Both are asked for at every launch, and reading a device's properties takes longer than a launch.
@cache
def _architecture(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (``n >= 1``): the tiles of Triton have such sides."""
    return 1 << (n - 1).bit_length()
