"""Interface to Triton: detects whether it is installed, and launches all kernels.

Kernels are defined at the top level of their module with the decorators of this module. ``@kernel`` makes an entry
point that is launched as ``kernel[grid](*args, **options)``; ``@kernel_with`` makes one with arguments that vary; and
``@jit`` makes a device function that kernels call. Without triton the decorators are placeholders, so that the modules
can be imported and the CPU paths work.

An operation calls `runs_on_triton` to choose between kernel and CPU path. Three kinds of tensors go to the kernel: CUDA
tensors; CPU tensors, if ``TRITON_INTERPRET=1`` was set before triton was imported (in tests); and meta tensors inside
`record_launches`, which records launches instead of executing them. `kernels.aot` compiles recorded launches without a
GPU. A meta tensor has no values, so recording also proves that an operation reads no value back to the host.
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
        triton = None

        class tl:  # noqa: N801 - stands in for the module; annotations are strings and look nothing up
            pass


__all__ = [
    "HAVE_TRITON",
    "INTERPRETED",
    "Kernel",
    "Launch",
    "architecture",
    "constant",
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
    """A recorded launch: the kernel, its grid, arguments and options."""

    kernel: Kernel
    grid: Sequence[int]
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Recording:
    """Recorded launches, and the architecture that they are for."""

    launches: list[Launch]
    architecture: int


_recording: ContextVar[_Recording | None] = ContextVar("kernel_launches", default=None)


class Kernel:
    """Entry point of a kernel, compiled for the types of its arguments when first launched."""

    def __init__(self, function: Callable[..., None], varying: Sequence[str] = ()) -> None:
        self.name: str = function.__name__.strip("_")
        self.varying = frozenset(varying)
        """Arguments whose values do not cause a new compilation."""
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
    """Make a function an entry point that is compiled once for all values of the named arguments.

    By default Triton specialises a kernel for an integer that is 1, one that is divisible by 16, and any other; and for
    aligned (16 bytes) and unaligned pointers. ``varying`` must list the arguments that
    change from step to step, such as the number of rows or pointers into a packed upload. Otherwise steps would wait
    for the compiler.
    """
    return lambda function: Kernel(function, varying)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function`` a device function, callable from kernels only."""
    compiled: Callable[..., Any] = triton.jit(function) if HAVE_TRITON else function
    return compiled


def constant(value: float) -> Any:
    """Make a number a global constant that kernels may use."""
    return tl.constexpr(value) if HAVE_TRITON else value


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Return whether an operation on ``tensor`` uses the Triton kernel instead of the CPU path."""
    return HAVE_TRITON and (tensor.is_cuda or INTERPRETED or (tensor.is_meta and _recording.get() is not None))


@contextmanager
def record_launches(architecture: int = 90) -> Iterator[list[Launch]]:
    """Record the launches of this thread in a list instead of executing them, within the context.

    Operations behave as on a GPU of compute capability ``architecture``.
    """
    recording = _Recording([], architecture)
    token = _recording.set(recording)
    try:
        yield recording.launches
    finally:
        _recording.reset(token)


def architecture(tensor: torch.Tensor) -> int:
    """Return the compute capability of the GPU of ``tensor``, 90 for sm_90; 0 in the interpreter."""
    recording = _recording.get()
    if recording is not None:
        return recording.architecture
    return _architecture(tensor.device) if tensor.is_cuda else 0


def num_multiprocessors(tensor: torch.Tensor) -> int:
    """Return the number of multiprocessors of the GPU of ``tensor``; without a GPU, that of an H100."""
    if _recording.get() is not None or not tensor.is_cuda:
        return 132
    return _num_multiprocessors(tensor.device)


# Both are needed at every launch, and reading device properties takes longer than a launch.
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
