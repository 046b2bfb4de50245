"""Names, shapes and types of the tensors in a GGUF file, read from its header without any package."""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"GGUF"
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value, by its type."""
_STRING, _ARRAY = 8, 9
_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    30: "BF16",
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]
    """Outputs first."""
    kind: str
    """Type, such as "Q4_K"; "" for a type that Quire does not read."""


def read_tensor_infos(file: Path) -> tuple[GgufTensor, ...]:
    """Return the tensors of a GGUF file.

    Raises:
        ValueError: the file is not a GGUF file of version 2 or 3, or ends early.
    """
    try:
        with file.open("rb") as opened:
            if opened.read(4) != _MAGIC or _number(opened, "<I") not in (2, 3):
                raise ValueError("it is not a GGUF file of version 2 or 3")
            num_tensors, num_values = _number(opened, "<Q"), _number(opened, "<Q")
            for _ in range(num_values):
                _text(opened)
                _skip(opened, _number(opened, "<I"))
            return tuple(_tensor(opened) for _ in range(num_tensors))
    except struct.error:
        raise ValueError("it ends within its header") from None


def _tensor(opened: BinaryIO) -> GgufTensor:
    name = _text(opened).decode("utf-8", "replace")
    shape = [_number(opened, "<Q") for _ in range(_number(opened, "<I"))]
    kind = _TYPES.get(_number(opened, "<I"), "")
    _number(opened, "<Q")  # offset of the data
    return GgufTensor(name, tuple(reversed(shape)), kind)


def _skip(opened: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        _text(opened)
    elif kind == _ARRAY:
        inner, count = _number(opened, "<I"), _number(opened, "<Q")
        if inner in _SIZES:
            opened.seek(count * _SIZES[inner], 1)
        else:
            for _ in range(count):
                _skip(opened, inner)
    elif kind in _SIZES:
        opened.seek(_SIZES[kind], 1)
    else:
        raise ValueError(f"its metadata has the unknown type {kind}")


def _text(opened: BinaryIO) -> bytes:
    length = _number(opened, "<Q")
    found = opened.read(length)
    if len(found) < length:
        raise ValueError("it ends within its header")
    return found


def _number(opened: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, opened.read(struct.calcsize(form)))[0])
