"""Python's cyclic garbage collector, kept out of the hot path.

The scheduler's objects form no cycles (`tests/scheduler_svc/test_collector.py`), so collections find nothing, but the
default thresholds would walk all live requests every few hundred allocations. What exists after the start is frozen;
later generations are looked at rarely.
"""

import gc

_YOUNG_THRESHOLD = 50_000


def tame_collector() -> None:
    """Called once, when a process has started."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_THRESHOLD, 20, 100)
