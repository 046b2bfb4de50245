"""Decorators of Triton kernels. Only modules with kernels import this one, because it imports triton.

Kernels are defined at the top level of their module. ``@kernel`` makes an entry point that is launched as
``kernel[grid](*args, **options)``; ``@kernel_with`` makes one with arguments that vary; and ``@jit`` makes a device
function that kernels call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from kernels._dispatch import Kernel

__all__ = ["constant", "jit", "kernel", "kernel_with", "tl", "triton"]


def kernel(function: Callable[..., None]) -> Kernel:
    """Make ``function`` an entry point."""
    return kernel_with(varying=())(function)


def kernel_with(*, varying: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Make a function an entry point that is compiled once for all values of the named arguments.

    By default Triton specialises a kernel for an integer that is 1, one that is divisible by 16, and any other; and for
    aligned (16 bytes) and unaligned pointers. ``varying`` must list the arguments that
    change from step to step, such as the number of rows or pointers into a packed upload. Otherwise steps would wait
    for the compiler.
    """

    def decorate(function: Callable[..., None]) -> Kernel:
        names = list(varying)
        compiled = triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)
        return Kernel(function.__name__.strip("_"), compiled, varying)

    return decorate


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``function`` a device function, callable from kernels only."""
    compiled: Callable[..., Any] = triton.jit(function)
    return compiled


def constant(value: float) -> Any:
    """Make a number a global constant that kernels may use."""
    return tl.constexpr(value)
