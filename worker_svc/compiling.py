"""Tells the scheduler that a step will take longer because a kernel is compiled first.

The scheduler gives up a worker whose step is overdue, by deadlines learnt from steps that compiled nothing. A kernel is
compiled in the midst of a step whose batch is the first of its kind: right then, before the compiler begins, the
scheduler is told how much longer it may take. Each kernel is told anew; what it extends ends with the step.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kernels.compiling import before_compiling
from shared.logging import get_logger

LONGEST_COMPILE_MS = 60_000
"""What the scheduler is told; a kernel takes seconds, on a machine that is short of cores many."""


@contextmanager
def compiling_told(tell: Callable[[int], None]) -> Iterator[None]:
    """Within the block, `tell` is called right before each kernel is compiled, with how long it may take in ms."""

    def notify(kernel: str) -> None:
        get_logger().info("compiling", kernel=kernel)
        tell(LONGEST_COMPILE_MS)

    with before_compiling(notify):
        yield
