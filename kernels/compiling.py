"""Callback that runs before Triton compiles a kernel.

Triton compiles a kernel at the first launch with a new combination of argument types, sizes and alignments. The
compilation delays a step by a second or more, and only Triton knows which launch causes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernels._dispatch import HAVE_TRITON


@contextmanager
def before_compiling(notify: Callable[[str], None]) -> Iterator[None]:
    """While the context is active, call ``notify`` with a kernel's name before Triton compiles or loads that kernel.

    Loading means reading the compiled kernel from Triton's disk cache. The launching thread makes the call. Without
    triton, and in Triton's interpreter, nothing is compiled and ``notify`` is not called.
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
