"""The one place that knows whether triton is installed.

Kernels are written at the top level of their module, with ``@jit`` and ``tl`` from here. Where triton is missing both
are stand-ins that let the module be imported (a kernel's body is never run then), so that the CPU paths work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    HAVE_TRITON = False

    class _LanguageStandIn:
        """Answers the only lookup that importing a kernel makes: the annotation ``tl.constexpr``."""

        constexpr = int

    tl = _LanguageStandIn()
else:
    HAVE_TRITON = True


class Kernel(Protocol):
    """A compiled-on-demand kernel: ``kernel[grid](*args, **options)`` enqueues it on the current stream."""

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]: ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Make ``function`` a Triton kernel (or a device function of one)."""
    return cast(Kernel, triton.jit(function) if HAVE_TRITON else function)


def runs_on_triton(tensor: torch.Tensor) -> bool:
    """Whether an operation on ``tensor`` belongs to the Triton kernel rather than the CPU path."""
    return HAVE_TRITON and tensor.is_cuda


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n`` (``n >= 1``): Triton's tiles have such sides."""
    return 1 << (n - 1).bit_length()
