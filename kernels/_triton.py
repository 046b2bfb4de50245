"""The one place that knows whether triton is installed, and the only way a kernel is launched.

Kernels are written at the top level of their module with what this one exports: ``@kernel`` makes an entry
point that is launched as ``kernel[grid](*args, **options)``, ``@jit`` a device function that kernels call.
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
    "jit",
    "kernel",
    "next_power_of_2",
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


_recording: ContextVar[list[Launch] | None] = ContextVar("kernel_launches", default=None)


class Kernel:
    """An entry point: compiled for its arguments' types when first launched, then enqueued on the current
    stream."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.name: str = function.__name__.strip("_")
        self.function: Any = triton.jit(function) if HAVE_TRITON else None

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            launches = _recording.get()
            if launches is None:
                self.function[grid](*args, **options)
            else:
                launches.append(Launch(self, grid, args, options))

        return launch


def kernel(function: Callable[..., None]) -> Kernel:
    """Make ``function`` an entry point."""
    return Kernel(function)


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function`` a device function, callable from kernels only."""
    compiled: Callable[..., Any] = triton.jit(function) if HAVE_TRITON else function
    return compiled


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` belongs to the Triton kernel rather than the CPU path."""
    return HAVE_TRITON and (tensor.is_cuda or INTERPRETED or (tensor.is_meta and _recording.get() is not None))


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Within the block, kernels launched by this thread are appended to the list and not run."""
    launches: list[Launch] = []
    token = _recording.set(launches)
    try:
        yield launches
    finally:
        _recording.reset(token)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (``n >= 1``): the tiles of Triton have such sides."""
    return 1 << (n - 1).bit_length()
