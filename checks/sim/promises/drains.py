"""Which requests a drain moves."""

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from records.rules.violation import ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from shared.request_spec import Pooling


class DrainsMoveWhatHasRoom(Promise):
    """A drain that moves requests moves exactly those for which another worker has room at full length.

    A drain that does not move requests leaves all of them on the worker.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._stay: dict[Stream, bool] = {}
        """The requests in rows of the drained worker, and whether each must stay."""

    def before(self, event: ev.Event) -> None:
        self._stay.clear()
        if not isinstance(event, ev.DrainRequested):
            return
        others = (epoch.context for epoch in self.cluster.usable if epoch.worker_id != event.worker_id)
        longest = max(others, default=0)
        for stream in self.clients.live.values():
            if stream.epoch is not None and stream.epoch.worker_id == event.worker_id and is_in_row(stream):
                self._stay[stream] = not event.move or stream.longest > longest

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        if not isinstance(event, ev.DrainRequested):
            return
        for stream, stays in self._stay.items():
            if stream.end is not None:
                continue
            if stays and stream.epoch is None:
                raise ViolationError("drain.moved", "it was moved away, to where there is no room for it", stream.name)
            if not stays and stream.epoch is not None:
                raise ViolationError("drain.stayed", "it was not moved away although there is room", stream.name)
            self.seen(Limit.STAYED if stays else Limit.MOVED)

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        filled_context = stream.num_known >= epoch.context
        if outcome == "moved" and stream not in self._stay and not filled_context:
            raise ViolationError("drain.moved", f"it was not in a row of {epoch.worker_id}", stream.name)


def is_in_row(stream: Stream) -> bool:
    """Return whether the request occupies its row. A request whose last step is planned has left its row."""
    epoch = stream.epoch
    if epoch is None or stream.row is None:
        return False
    row = epoch.model.rows.get(stream.row[0])
    if row is None or row.generation != stream.row[1]:
        return False
    if stream.demand.pooling is not Pooling.NONE:
        return row.computed < row.num_prompt
    return len(row.tokens) - _num_accepted_in_flight(stream, epoch, row.index) < stream.longest


def _num_accepted_in_flight(stream: Stream, epoch: Epoch, row: int) -> int:
    """Return the number of accepted drafts that the core does not know yet. The core counts one token per such step."""
    answers = (sent.answer for sent in epoch.in_flight if stream.name in sent.names)
    return sum(int((answer.counts[answer.rows == row] - 1).sum()) for answer in answers if answer.counts is not None)
