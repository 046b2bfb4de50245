"""Which facts of the corpus are kept for measuring: a split by hash, not by list.

Whether an item is held out depends on the item alone, so the generator, the evaluation and the tests agree
on it without sharing any state, and a larger corpus or another seed can never move an item across the line.
"""

import hashlib

HELD_OUT_ONE_IN = 10


def is_held_out(family: str, *parts: object) -> bool:
    """Whether the item `parts` of `family` ("name", "sum", ...) is reserved for measuring and barred from training."""
    key = "|".join((family, *map(str, parts))).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0
