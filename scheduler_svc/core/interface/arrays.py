"""Array types of the core.

Row and block numbers are `IndexArray`s inside the core and int32 on the wire. numpy converts other index types first,
so its own type is several times faster.
"""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
IndexArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]

NO_INDICES: IndexArray = np.zeros(0, np.intp)

ONE = np.array(1, np.int32)
"""Arithmetic with this array takes half the time of arithmetic with the number 1, which numpy converts every time."""


def any_of(mask: BoolArray) -> bool:
    """Return `mask.any()`, computed over the mask's bytes, an eighth of the time for a few hundred values."""
    return 1 in mask.tobytes()


def all_of(mask: BoolArray) -> bool:
    """Return `mask.all()`, as fast as `any_of`."""
    return 0 not in mask.tobytes()


def where(mask: BoolArray) -> IndexArray:
    """Return `np.flatnonzero(mask)`, in a fifth of the time."""
    return mask.nonzero()[0]


def spread(first: Int32Array, counts: Int32Array) -> Int32Array:
    """Return `counts[i]` consecutive numbers from `first[i]` on, for each i in order."""
    begins = counts.cumsum(dtype=np.int32) - counts
    total = int(counts.sum())
    return np.repeat(first - begins, counts) + np.arange(total, dtype=np.int32)
