"""Packs parts into messages that fit into frames.

When a frame exceeds the receiver's limit, ZeroMQ drops the whole connection. Parts for one peer are therefore packed
into messages of up to `PACKED_BYTES`. A larger part gets a separate message. A part of more than `MAX_PART_BYTES` is
rejected with an error that names the part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import Message

from shared.frames import MAX_PART_BYTES, PACKED_BYTES, FrameTooLargeError

MessageT = TypeVar("MessageT", bound=Message)
PartT = TypeVar("PartT", bound=Message)
ValuesT = TypeVar("ValuesT", bound=Sequence[object])


class Packer(Generic[MessageT]):
    """Packs parts into messages of one type, in order."""

    def __init__(self, new: Callable[[], MessageT]) -> None:
        self._new = new
        self.messages = [new()]
        """Packed messages; at least one, which may be empty."""
        self._size = 0

    def message_for(self, size: int, what: str) -> MessageT:
        """Return the message for the next part: the last message if it has room, otherwise a new message.

        Args:
            size: size of the part, bytes.
            what: name of the part in errors, including its request if any.

        Raises:
            FrameTooLargeError: the part does not fit into any frame.
        """
        check_part(size, what)
        if self._size and self._size + size > PACKED_BYTES:
            self.messages.append(self._new())
            self._size = 0
        self._size += size
        return self.messages[-1]


def check_part(size: int, what: str) -> None:
    """Check that a part fits into a frame.

    Raises:
        FrameTooLargeError: it does not.
    """
    if size > MAX_PART_BYTES:
        raise FrameTooLargeError(f"{what}: {size} bytes do not fit into a frame, which takes at most {MAX_PART_BYTES}")


def in_parts(values: ValuesT, width: int) -> Iterator[ValuesT]:
    """Yield slices of `values`, of `width` bytes per value, such that each slice fits into a message."""
    most = PACKED_BYTES // width
    for start in range(0, len(values), most):
        yield values[start : start + most]  # type: ignore[misc]


def fitting(parts: Iterable[PartT]) -> Iterator[PartT]:
    """Yield the longest prefix of `parts` that fits into one part of a frame."""
    size = 0
    for part in parts:
        size += part.ByteSize() + _FIELD_BYTES
        if size > MAX_PART_BYTES - _FIELD_BYTES:
            return
        yield part


_FIELD_BYTES = 16
"""Maximum overhead of a part as a field of another message, bytes."""
