"""The number of examples of property tests: a base number in `make test`, a multiple of it in `make fuzz`."""

import os

FACTOR = int(os.environ.get("QUIRE_EXAMPLES", "1"))
"""Multiple of the base number."""


def examples(count: int) -> int:
    """Return `max_examples` of a test that tries `count` examples in `make test`."""
    return count * FACTOR
