"""Decorators for Triton kernels. Only modules that define kernels import this module, because it imports triton.

Kernels are defined at the top level of their module. ``@kernel`` makes an entry point that is launched as
``kernel[grid](*args, **options)``. ``@kernel_with`` makes an entry point with arguments that change from step to step.
``@jit`` makes a device function that kernels call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from kernels._dispatch import Kernel

__all__ = ["constant", "jit", "kernel", "kernel_with", "tl", "triton"]


def kernel(function: Callable[..., None]) -> Kernel:
    """Make ``function`` a kernel that is launched from the host."""
    return kernel_with(varying=())(function)


def kernel_with(*, varying: Sequence[str]) -> Callable[[Callable[..., None]], Kernel]:
    """Make a function an entry point that is compiled once for all values of the named arguments.

    By default Triton compiles separate kernels for an integer argument that is 1, divisible by 16, or neither, and for
    a pointer that is or is not aligned to 16 bytes. ``varying`` must list the arguments that change from step to step,
    such as the number of rows or pointers into a packed upload. Otherwise such changes would trigger compilations
    during steps.
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
