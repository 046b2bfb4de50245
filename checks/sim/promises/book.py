"""The place of every stream, from the core's plans and effects: waiting, or running on a worker.

The core reports preemptions and losses only for traced requests. So the book is complete only in simulations that trace
all requests. Promises that need it are checked only there.
"""

from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from checks.sim.world import World
from scheduler_svc.core.interface.records import EndReason

_ENDS = frozenset(reason.value for reason in EndReason)


class Book:
    """The streams that one core knows."""

    def __init__(self, world: World) -> None:
        self.is_complete = world.scenario.traffic.traced == 1.0
        self.waiting: dict[Stream, int] = {}
        """Streams that are on no worker, with their number of tokens when the wait began."""
        self.sequence: dict[Stream, int] = {}
        """Order of arrival of the core's streams."""
        self._arrivals = 0

    def knows(self, stream: Stream) -> bool:
        """Return whether the stream has arrived and not ended."""
        return stream in self.sequence

    def arrived(self, stream: Stream) -> None:
        """Record that the core has accepted a stream."""
        self._arrivals += 1
        self.sequence[stream] = self._arrivals
        self.waiting[stream] = stream.num_known

    def admitted(self, stream: Stream, epoch: Epoch, row: tuple[int, int]) -> None:
        """Record that a plan admitted the stream."""
        self.waiting.pop(stream, None)
        if stream.epoch is not None:
            stream.home = stream.epoch  # The stream is not traced, so its departure is not reported.
        stream.epoch, stream.row = epoch, row
        stream.placements += 1
        stream.context = epoch.context

    def left(self, stream: Stream, outcome: str) -> Epoch | None:
        """Record that a traced stream left its worker. If the stream waits again, return this worker."""
        epoch = stream.epoch
        self._leave_row(stream)
        if outcome in _ENDS or epoch is None:
            return None
        stream.preemptions += 1
        if epoch.in_flight:
            stream.unsettled_until = epoch, epoch.in_flight[-1].answer.step
        stream.epoch, stream.home = None, epoch
        self.waiting[stream] = stream.num_known
        return epoch

    def ended(self, stream: Stream) -> None:
        """Record that a stream is over."""
        self._leave_row(stream)
        self.waiting.pop(stream, None)
        self.sequence.pop(stream, None)

    @staticmethod
    def _leave_row(stream: Stream) -> None:
        if stream.epoch is not None and stream.row is not None:
            stream.epoch.must_leave.append((*stream.row, stream.name))
        stream.row = None
