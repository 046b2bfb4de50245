"""How many examples property tests try: so many in `make test`, a multiple of it in `make fuzz`."""

import os

FACTOR = int(os.environ.get("QUIRE_EXAMPLES", "1"))
"""How many times as many."""


def examples(count: int) -> int:
    """`max_examples` of a test that tries `count` in `make test`."""
    return count * FACTOR
