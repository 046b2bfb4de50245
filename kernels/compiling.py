"""When a kernel is compiled: on its first launch for the types, sizes and alignments of its arguments.

That takes a second or more in the midst of a step, and nothing but Triton knows beforehand which launch it is. Whoever
must know asks here to be told right before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kernels._triton import HAVE_TRITON, triton


@contextmanager
def before_compiling(notify: Callable[[str], None]) -> Iterator[None]:
    """Within the block, ``notify`` is called with a kernel's name right before it is compiled (or read from Triton's
    cache on disk), in the thread that launches it. Without triton, or in its interpreter, nothing is compiled."""
    if not HAVE_TRITON:
        yield
        return
    earlier = triton.knobs.runtime.jit_cache_hook

    def hook(*arguments: Any, **details: Any) -> bool | None:
        notify(details["fn"].name.strip("_"))
        # True from a hook would keep the kernel from being compiled.
        return None if earlier is None else earlier(*arguments, **details)

    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = earlier
