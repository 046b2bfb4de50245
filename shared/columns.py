"""Columns: packed little-endian int32 values in a protobuf `bytes` field.

A column costs four bytes a value and no Python object per value on either side; protobuf's own repeated fields cost an
object each. An absent column is an empty one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

_WIRE_TYPE = np.dtype("<i4")


class MalformedColumnError(ValueError):
    """A column whose bytes are no whole number of int32 values, or whose length does not match its group's."""


def to_column(values: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Packs integers that fit into int32."""
    # Most columns of a plan are empty, and most others are arrays.
    if not len(values):
        return b""
    if isinstance(values, np.ndarray):
        return values.astype(_WIRE_TYPE, copy=False).tobytes()
    return np.array(values, _WIRE_TYPE).tobytes()


def from_column(column: bytes) -> Int32Array:
    """Unpacks a column as a read-only array `[n] int32`, without copying it."""
    if len(column) % 4:
        raise MalformedColumnError(f"a column of {len(column)} bytes is no whole number of int32 values")
    return np.frombuffer(column, dtype=_WIRE_TYPE)


def from_columns(*columns: bytes) -> tuple[Int32Array, ...]:
    """Unpacks columns of one group, which must have equal length."""
    arrays = tuple([from_column(column) for column in columns])
    length = len(columns[0])
    for column in columns:
        if len(column) != length:
            raise MalformedColumnError(f"columns of one group differ in length: {[len(array) for array in arrays]}")
    return arrays
