"""Writes traces that Perfetto (ui.perfetto.dev) reads.

A trace is a sequence of packets. Each packet is written immediately, so memory use does not grow with the trace. Only
the few fields needed for a timeline are encoded here, with the field numbers in perfetto_trace.proto. A test parses the
output with the protos in Perfetto's own package.
"""

import struct
from collections.abc import Mapping
from typing import IO

Value = int | float | str

_NS = 1e9

_PACKET, _SEQUENCE, _FLAGS = b"\x0a", b"\x50\x01", b"\x68"
"""Trace.packet; TracePacket.trusted_packet_sequence_id = 1; sequence_flags."""
_TIMESTAMP, _EVENT, _INTERNED, _CLOCKS, _TRACK = b"\x40", b"\x5a", b"\x62", b"\x32", b"\xe2\x03"
"""Fields of TracePacket."""
_BEGIN, _END, _INSTANT, _COUNTER = (b"\x48" + bytes([kind]) for kind in (1, 2, 3, 4))
"""TrackEvent.type."""
_FLOW = b"\xf9\x02"
"""TrackEvent.flow_ids."""
_CLEARED, _NEEDED = 1, 2
"""TracePacket.sequence_flags: interned names are cleared; interned names are used."""
_EXPLICIT = 3
"""TrackDescriptor.child_ordering: children are ordered by their ranks."""
_BOOTTIME, _REALTIME = 6, 1
"""Clock ids. All timestamps use BOOTTIME, which is set to the values of REALTIME."""
_DOUBLE, _FIXED64 = struct.Struct("<d"), struct.Struct("<Q")


def flow(number: int) -> bytes:
    """Return an encoded flow id. Arrows connect the events of a flow in time order."""
    return _FLOW + _FIXED64.pack(number)


class TraceWriter:
    """Writes one trace. Times are seconds on the core's clock."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._num_tracks = 0
        self._arguments: dict[str, bytes] = {}
        self._offset_ns = 0
        self.is_muted = False
        """Whether events are skipped; tracks are still written."""
        self.num_bytes = 0
        self._packet(_FLAGS + _varint(_CLEARED))

    def set_clock(self, time: float, unix_ns: int) -> None:
        """Set the wall-clock time (ns since 1970) that corresponds to a core time, for all later events."""
        self._offset_ns = unix_ns - round(time * _NS)
        clocks = b"".join(
            _bytes(b"\x0a", b"\x08" + _varint(clock) + b"\x10" + _varint(unix_ns)) for clock in (_BOOTTIME, _REALTIME)
        )
        self._packet(_TIMESTAMP + _varint(unix_ns) + _bytes(_CLOCKS, clocks))

    def track(self, name: str, *, parent: int = 0, rank: int = 0, counts: bool = False) -> int:
        """Add a track and return its number.

        Args:
            name: label of the track.
            parent: number of the track under which this track is shown; 0 for none.
            rank: position among the tracks with the same parent, lowest first.
            counts: whether the track is a counter.
        """
        self._num_tracks += 1
        track = b"\x08" + _varint(self._num_tracks) + _bytes(b"\x12", name.encode())
        track += b"\x28" + _varint(parent) if parent else b""
        track += _bytes(b"\x42", b"") if counts else b""
        track += b"\x58" + _varint(_EXPLICIT) + b"\x60" + _varint(rank)
        self._packet(_bytes(_TRACK, track))
        return self._num_tracks

    def begin(
        self, track: int, time: float, name: str, arguments: Mapping[str, Value] = {}, flows: bytes = b""
    ) -> None:
        """Begin a slice; a track's slices nest. `flows` are joined values from `flow`."""
        self._event(_BEGIN, track, time, name, arguments, flows)

    def end(self, track: int, time: float) -> None:
        """End the innermost slice of a track."""
        if not self.is_muted:
            self._packet(self._time(time) + _bytes(_EVENT, _END + b"\x58" + _varint(track)))

    def instant(
        self, track: int, time: float, name: str, arguments: Mapping[str, Value] = {}, flows: bytes = b""
    ) -> None:
        """Add an event without duration."""
        self._event(_INSTANT, track, time, name, arguments, flows)

    def count(self, track: int, time: float, value: int) -> None:
        """Set the value of a counter."""
        if not self.is_muted:
            event = _COUNTER + b"\x58" + _varint(track) + b"\xf0\x01" + _varint(value)
            self._packet(self._time(time) + _bytes(_EVENT, event))

    def _event(
        self, kind: bytes, track: int, time: float, name: str, arguments: Mapping[str, Value], flows: bytes
    ) -> None:
        if self.is_muted:
            return
        # Argument names are interned. Event names are not, because there may be one per request.
        interned = b""
        parts = [kind, b"\x58", _varint(track), _bytes(b"\xba\x01", name.encode()), flows]
        for argument, value in arguments.items():
            number = self._arguments.get(argument)
            if number is None:
                number = self._arguments[argument] = b"\x08" + _varint(len(self._arguments) + 1)
                interned += _bytes(b"\x1a", number + _bytes(b"\x12", argument.encode()))
            parts.append(_bytes(b"\x22", number + _value(value)))
        packet = self._time(time) + _FLAGS + _varint(_NEEDED) + _bytes(_EVENT, b"".join(parts))
        self._packet(packet + _bytes(_INTERNED, interned) if interned else packet)

    def _time(self, time: float) -> bytes:
        return _TIMESTAMP + _varint(round(time * _NS) + self._offset_ns)

    def _packet(self, content: bytes) -> None:
        data = _bytes(_PACKET, _SEQUENCE + content)
        self._out.write(data)
        self.num_bytes += len(data)


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _bytes(field: bytes, content: bytes) -> bytes:
    return field + _varint(len(content)) + content


def _value(value: Value) -> bytes:
    if isinstance(value, str):
        return _bytes(b"\x32", value.encode())
    if isinstance(value, float):
        return b"\x29" + _DOUBLE.pack(value)
    return b"\x20" + _varint(value & 0xFFFFFFFFFFFFFFFF)
