"""Settings that keep Python's cyclic garbage collector out of the hot path.

The scheduler's objects form no cycles (`tests/scheduler_svc/test_collector.py`), so collections free nothing. With the
default thresholds, collections would still traverse all live requests after every few hundred allocations. The objects
that exist after the start are therefore frozen, and the thresholds are raised.
"""

import gc
import time
from collections.abc import Callable

_YOUNG_THRESHOLD = 50_000


def tune_collector() -> None:
    """Freeze all present objects and raise the thresholds; call once when the process has started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, 20, 100)


def watch_collections(observe: Callable[[float], None]) -> None:
    """Report the time of every garbage collection, in seconds."""
    began = 0.0

    def called(phase: str, _info: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.monotonic()
        else:
            observe(time.monotonic() - began)

    gc.callbacks.append(called)
