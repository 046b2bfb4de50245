"""Tells the scheduler that a step takes longer because a kernel must be compiled first.

The scheduler drops a worker whose step misses its deadline, and learns this deadline from steps without compilation. A
kernel is compiled in the first step that needs it, so the worker requests more time immediately before each
compilation. The extension ends with the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kernels.compiling import before_compiling
from shared.logging import get_logger

LONGEST_COMPILE_MS = 60_000
"""Extension of the deadline per kernel. Compilation takes seconds, and many seconds on a machine with few cores."""


@contextmanager
def announce_compiling(announce: Callable[[int], None]) -> Iterator[None]:
    """Call `announce` before each compilation within the context, with the longest time that it may take in ms."""

    def notify(kernel: str) -> None:
        get_logger().info("compiling", kernel=kernel)
        announce(LONGEST_COMPILE_MS)

    with before_compiling(notify):
        yield
