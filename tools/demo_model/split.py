"""The split of the corpus into training and held-out items: by hash, not by list.

Whether an item is held out depends on the item alone. So the generator, the evaluation and the tests agree without
shared state. A larger corpus or another seed never moves an item to the other side.
"""

import hashlib

HELD_OUT_ONE_IN = 10


def is_held_out(family: str, *parts: object) -> bool:
    """Return whether the item `parts` of `family` ("name", "sum", ...) is held out from the training corpus."""
    key = "|".join((family, *map(str, parts))).encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0
