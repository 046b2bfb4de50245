"""Where every stream is, as the core's plans and effects tell: which ones wait, and which worker has the others.

The core tells of preemptions and losses for traced requests only. So the book is complete in simulations whose
requests are all traced; promises that rest on it are watched only there.
"""

from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.sim.sites import Epoch
from scheduler_svc.sim.stream import Stream
from scheduler_svc.sim.world import World

_ENDS = frozenset(reason.value for reason in EndReason)


class Book:
    """The streams that one core knows."""

    def __init__(self, world: World) -> None:
        self.is_complete = world.scenario.traffic.traced == 1.0
        self.waiting: dict[Stream, int] = {}
        """Streams that no worker has, and how many tokens each had when it began to wait."""
        self.sequence: dict[Stream, int] = {}
        """Order of arrival of the streams that the core has."""
        self._arrivals = 0

    def knows(self, stream: Stream) -> bool:
        """Whether the stream has arrived and not ended."""
        return stream in self.sequence

    def arrived(self, stream: Stream) -> None:
        """The core has accepted a stream."""
        self._arrivals += 1
        self.sequence[stream] = self._arrivals
        self.waiting[stream] = stream.num_known

    def admitted(self, stream: Stream, epoch: Epoch, row: tuple[int, int]) -> None:
        """A plan gave the stream a row."""
        self.waiting.pop(stream, None)
        stream.epoch, stream.row = epoch, row
        stream.placements += 1
        stream.context = min(stream.context, epoch.context)

    def left(self, stream: Stream, outcome: str) -> Epoch | None:
        """A traced stream left its worker; returns the worker that it left if it is not over and waits again."""
        epoch = stream.epoch
        self._leave_row(stream)
        if outcome in _ENDS or epoch is None:
            return None
        stream.preemptions += 1
        if epoch.in_flight:
            stream.unsettled_until = epoch, epoch.in_flight[-1].answer.step
        stream.epoch = None
        self.waiting[stream] = stream.num_known
        return epoch

    def ended(self, stream: Stream) -> None:
        """A stream is over."""
        self._leave_row(stream)
        self.waiting.pop(stream, None)
        self.sequence.pop(stream, None)

    @staticmethod
    def _leave_row(stream: Stream) -> None:
        if stream.epoch is not None and stream.row is not None:
            stream.epoch.must_leave.append((*stream.row, stream.name))
        stream.row = None
