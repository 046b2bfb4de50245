"""Nearly valid frames, such as a broken, older or hostile peer might send.

Half are drawn field by field, so that they parse and are processed as far as possible. The others are valid or drawn
frames with bytes flipped, removed, duplicated and spliced, or random bytes.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shared.columns import to_column

MAX_DEPTH = 4
_EDGES = (0, 1, 2, 3, 4, 7, 8, 16, 63, 64, 255, 256, 1000, 2**16, 2**26, 2**31 - 1, 2**31, 2**32 - 1)
_COLUMN_EDGES = (-(2**31), -1, 0, 1, 2, 3, 7, 8, 100, 2**31 - 1)
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), -float("inf"))
_TEXTS = ("", "a", "w", "f", "\n", "\0", "é" * 40, "x" * 70, "x" * 3000)


class Frames:
    """Draws frames of one kind."""

    def __init__(self, kind: type[Message], rng: random.Random, fixed: dict[str, Any]) -> None:
        """`fixed` are fields of the outermost message that usually keep their correct values, for example the epoch."""
        self._kind = kind
        self._rng = rng
        self.fixed = fixed

    def draw(self, right: Sequence[Message]) -> bytes:
        """Return one frame; `right` contains valid messages."""
        chance = self._rng.random()
        if chance < 0.05:
            return self._rng.randbytes(self._rng.randrange(200))
        if chance < 0.5:
            return self._message().SerializeToString()
        if chance < 0.65:
            return self._mutate(self._message().SerializeToString())
        frame = self._rng.choice(right).SerializeToString()
        if chance < 0.75:  # Protobuf merges repeated fields.
            return frame + self._message().SerializeToString()
        return self._mutate(frame)

    def _message(self) -> Message:
        message = self._kind()
        fill(message, self._rng)
        for name, value in self.fixed.items():
            if self._rng.random() < 0.95:
                setattr(message, name, value)
        return message

    def _mutate(self, frame: bytes) -> bytes:
        rng, data = self._rng, bytearray(frame)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            at = rng.randrange(len(data) + 1)
            length = rng.choice((1, 1, 2, 4, 16))
            match rng.randrange(6):
                case 0 if at < len(data):
                    data[at] ^= 1 << rng.randrange(8)
                case 1 if at < len(data):
                    data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
                case 2:
                    del data[at : at + length]
                case 3:
                    data[at:at] = data[at : at + length]
                case 4:
                    data[at:at] = rng.randbytes(length)
                case 5 if rng.random() < 0.2:
                    del data[at:]
        return bytes(data)


def fill(message: Message, rng: random.Random, depth: int = 0) -> None:
    """Set some fields, recursively, to extreme values that the wire format can carry."""
    fields: list[Any] = list(message.DESCRIPTOR.fields)
    for field in rng.sample(fields, min(len(fields), rng.choice((1, 1, 2, 3, 6)))):
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            continue
        here = getattr(message, field.name)
        if entry is not None and depth >= MAX_DEPTH:
            continue
        if field.is_repeated and entry is not None:
            for _ in range(rng.choice((1, 1, 2, 5))):
                fill(here.add(), rng, depth + 1)
        elif field.is_repeated:
            here.extend(_VALUES[field.type](rng) for _ in range(rng.randrange(6)))
        elif entry is not None:
            here.SetInParent()
            fill(here, rng, depth + 1)
        else:
            setattr(message, field.name, _VALUES[field.type](rng))


def _number(bits: int, *, signed: bool = False) -> Callable[[random.Random], int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)

    def draw(rng: random.Random) -> int:
        return rng.choice(_EDGES[:10]) if rng.random() < 0.7 else min(max(rng.choice((*_EDGES, low, high)), low), high)

    return draw


def _bytes(rng: random.Random) -> bytes:
    """Return bytes, usually a valid column."""
    if rng.random() < 0.2:
        return rng.randbytes(rng.randrange(70))
    edges = _COLUMN_EDGES[2:8] if rng.random() < 0.7 else _COLUMN_EDGES
    return to_column([rng.choice(edges) for _ in range(rng.randrange(6))])


_VALUES: dict[int, Callable[[random.Random], Any]] = {
    FieldDescriptor.TYPE_STRING: lambda rng: rng.choice(_TEXTS),
    FieldDescriptor.TYPE_BYTES: _bytes,
    FieldDescriptor.TYPE_BOOL: lambda rng: rng.random() < 0.5,
    FieldDescriptor.TYPE_FLOAT: lambda rng: rng.choice(_FLOATS),
    FieldDescriptor.TYPE_DOUBLE: lambda rng: rng.choice(_FLOATS),
    FieldDescriptor.TYPE_INT32: _number(32, signed=True),
    FieldDescriptor.TYPE_SINT32: _number(32, signed=True),
    FieldDescriptor.TYPE_INT64: _number(64, signed=True),
    FieldDescriptor.TYPE_UINT32: _number(32),
    FieldDescriptor.TYPE_UINT64: _number(64),
    FieldDescriptor.TYPE_FIXED64: _number(64),
    FieldDescriptor.TYPE_ENUM: lambda rng: rng.randrange(15),
}
