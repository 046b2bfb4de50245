"""Callback before a kernel is compiled.

Triton compiles a kernel at its first launch for the types, sizes and alignments of its arguments. This takes a second
or more within a step, and only Triton knows which launch it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernels._dispatch import HAVE_TRITON


@contextmanager
def before_compiling(notify: Callable[[str], None]) -> Iterator[None]:
    """Call ``notify`` with a kernel's name before it is compiled or read from Triton's disk cache, within the context.

    The thread that launches the kernel makes the call. Without triton, or in its interpreter, nothing is compiled.
    """
    if not HAVE_TRITON:
        yield
        return
    import triton

    earlier = triton.knobs.runtime.jit_cache_hook

    def hook(*arguments: Any, **details: Any) -> bool | None:
        notify(details["fn"].name.strip("_"))
        # A hook that returns True would prevent the compilation.
        return None if earlier is None else earlier(*arguments, **details)

    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = earlier
