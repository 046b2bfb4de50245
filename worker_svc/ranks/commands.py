"""Commands from rank 0 to its followers: launch a plan, drop all rows, or end.

A follower must collect step results at the same points between launches as rank 0, because steps launched after a row's
failure was collected omit that row. Each plan therefore contains the number of results that rank 0 has collected since
the previous plan.

Rank 0 sends a command at least every `BEAT_S`, so that a lost rank is noticed while no request runs.
"""

import enum
import struct
import time
from dataclasses import dataclass

import torch

from worker_svc.ranks.group import Group, RankLostError

BEAT_S = 1.0
"""Longest time between two commands while rank 0 is idle."""
_FIRST_BYTES = 4096
"""Bytes in a command's first broadcast; a longer command has a second one."""
_HEADER = struct.Struct("<III")


class Kind(enum.IntEnum):
    """Action of a follower."""

    BEAT = 0
    """Nothing."""
    PLAN = 1
    """Collect results, then launch the step of a plan."""
    RESET = 2
    """Drop all rows and all steps in flight."""
    STOP = 3
    """End in order."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    kind: Kind
    num_collected: int = 0
    """PLAN: results to collect before the launch."""
    frame: bytes = b""
    """PLAN: the frame of the scheduler that contains it."""


class Followers:
    """The other ranks, as seen by rank 0; there may be none."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._num_collected = 0
        self._last = 0.0

    def __bool__(self) -> bool:
        return self._group.size > 1

    def launch(self, frame: bytes) -> None:
        """Make the followers launch a frame's plan; call this immediately before `Engine.launch`."""
        if self:
            self._send(Command(Kind.PLAN, self._num_collected, frame))
            self._num_collected = 0

    def collected(self) -> None:
        """Note that rank 0 has collected a result."""
        self._num_collected += 1

    def reset(self) -> None:
        """Make the followers drop all rows, as `Engine.reset` does."""
        if self:
            self._send(Command(Kind.RESET))
        self._num_collected = 0

    def beat(self) -> None:
        """Send a command if none was sent for `BEAT_S`. Call it in every turn of the main loop."""
        if self and time.monotonic() - self._last >= BEAT_S:
            self._send(Command(Kind.BEAT))

    def stop(self) -> None:
        """Make the followers end."""
        if self:
            self._send(Command(Kind.STOP))

    def _send(self, command: Command) -> None:
        self._last = time.monotonic()
        content = _HEADER.pack(command.kind, command.num_collected, len(command.frame)) + command.frame
        first = bytearray(content[:_FIRST_BYTES].ljust(_FIRST_BYTES, b"\0"))
        try:
            self._group.broadcast(torch.frombuffer(first, dtype=torch.uint8))
            if len(content) > _FIRST_BYTES:
                self._group.broadcast(torch.frombuffer(bytearray(content[_FIRST_BYTES:]), dtype=torch.uint8))
        except RuntimeError as error:
            raise RankLostError(f"a follower does not receive: {error}") from None


def receive(group: Group) -> Command:
    """Wait for the next command of rank 0.

    Raises:
        RankLostError: rank 0 was lost.
    """
    try:
        first = group.broadcast(torch.empty(_FIRST_BYTES, dtype=torch.uint8)).numpy().tobytes()
        kind, num_collected, length = _HEADER.unpack_from(first)
        content = first[_HEADER.size : _HEADER.size + length]
        if len(content) < length:
            content += group.broadcast(torch.empty(length - len(content), dtype=torch.uint8)).numpy().tobytes()
    except RuntimeError as error:
        raise RankLostError(f"rank 0 does not send: {error}") from None
    return Command(Kind(kind), num_collected, content)
