"""Number of examples in property tests, and the seed of a run.

`make fuzz` sets a factor, so that property tests try more examples. `make test` uses the day's seed, so that successive
days cover different cases. `QUIRE_SEED=N` repeats a run's cases.
"""

import os
from datetime import UTC, datetime

FACTOR = int(os.environ.get("QUIRE_EXAMPLES", "1"))
"""Multiple of the base number."""
SEED = int(os.environ.get("QUIRE_SEED") or f"{datetime.now(UTC):%Y%m%d}")
"""Seed for everything that a run draws. By default it is the day's date."""


def examples(count: int) -> int:
    """Return `max_examples` of a test that tries `count` examples in `make test`."""
    return count * FACTOR
