"""Work counted in operations, which other work on the machine does not change as it changes times."""

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(action: Callable[[], object]) -> int:
    """How many calls of Python and C functions `action` makes."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    previous, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # The finalisers of objects from other tests also count as calls.
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(previous)
        if collects:
            gc.enable()
    return calls
