"""Columns: packed little-endian int32 values in a protobuf `bytes` field.

Unlike a repeated field, a column needs only four bytes per value and no Python object per value. An absent column is
empty.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_WIRE_TYPE = np.dtype("<i4")


class MalformedColumnError(ValueError):
    """A column's length is not a multiple of 4 bytes, or differs from another column's length in the same group."""


def to_column(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Pack integers that fit into int32."""
    # Fast paths: most columns of a plan are empty, and most others are arrays.
    if not len(values):
        return b""
    if isinstance(values, np.ndarray):
        return values.astype(_WIRE_TYPE).tobytes()
    return np.array(values, _WIRE_TYPE).tobytes()


def joined_column(arrays: Sequence[Int32Array]) -> bytes:
    """Pack several arrays into one column, one after the other."""
    if len(arrays) == 1:
        return to_column(arrays[0])
    return np.concatenate(arrays).astype(_WIRE_TYPE).tobytes() if arrays else b""


def from_column(column: bytes) -> Int32Array:
    """Unpack a column as a read-only array `[n] int32`, without copying it."""
    if len(column) % 4:
        raise MalformedColumnError(f"column: {len(column)} bytes is not a multiple of 4")
    return np.frombuffer(column, _WIRE_TYPE)


def from_columns(*columns: bytes) -> tuple[Int32Array, ...]:
    """Unpack the columns of one group, whose lengths must be equal."""
    arrays = tuple([from_column(column) for column in columns])
    length = len(columns[0])
    for column in columns[1:]:
        if len(column) != length:
            raise MalformedColumnError(f"columns: lengths differ within a group: {[len(array) for array in arrays]}")
    return arrays
