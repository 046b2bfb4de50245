"""Which requests become suspects when a worker dies."""

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from checks.sim.stream import Stream
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.plan import Plan, RowAdmission
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.workers.quarantine import FATAL_ALONE, FATAL_STEPS, PROBATION, PROVEN_BY, WITHDRAWABLE_S


class _Record:
    """Knowledge about one stream."""

    __slots__ = ("admitted_with", "alone", "at", "fatal", "surely")

    def __init__(self) -> None:
        self.fatal = 0
        """Number of deaths that the core may attribute to the stream."""
        self.surely = 0
        """Number of deaths that the core must attribute to the stream."""
        self.alone = 0
        """Number of deaths in a step that contained only this stream."""
        self.at = 0
        """Number of tokens at the last fatal step."""
        self.admitted_with = 0
        """Number of tokens at the last admission."""

    def clear(self) -> None:
        """Record that the stream is not a suspect now. At most one of its deaths still counts."""
        self.fatal, self.alone = min(self.fatal, FATAL_STEPS - 1), min(self.alone, FATAL_ALONE - 1)
        self.surely = 0


class Suspects(Promise):
    """A request is rejected only after two fatal steps in a batch and two consecutive ones alone.

    After two fatal steps a request runs alone, until the tokens that it generates alone show that it is harmless. No
    request is blamed when a worker says goodbye, breaks the protocol or is disconnected by the core.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._records: dict[Stream, _Record] = {}
        self._judged: set[Epoch] = set()
        self._last: dict[str, tuple[float, bool, list[Stream]]] = {}
        """By lost worker: the time, whether its step had one request only, and the requests in its steps."""
        self._event: ev.Event = ev.TimePassed()

    @property
    def may_try_alone(self) -> bool:
        return any(record.fatal >= FATAL_STEPS for record in self._records.values())

    # ---------------------------------------------------------------- deaths

    def before(self, event: ev.Event) -> None:
        self._event = event
        self._judge_losses()

    def displaced(self, stream: Stream, epoch: Epoch, outcome: str) -> None:
        if outcome == "worker lost":
            self._died(epoch)

    def _judge_losses(self) -> None:
        for epoch in self.cluster.lost:
            self._died(epoch)

    def _is_fatal(self) -> bool:
        match self._event:
            case ev.WorkerLost(orderly=orderly):
                return not orderly
            case ev.WorkerHello(reason=reason):
                return reason is not ev.HelloReason.SESSION_LOST
            case ev.StepDone():
                return False
        return True

    def _died(self, epoch: Epoch) -> None:
        """Handle a lost worker. Each request in its steps in flight may have killed it."""
        if epoch in self._judged:
            return
        self._judged.add(epoch)
        if not self._is_fatal():
            return
        names = [sent.names for sent in epoch.in_flight]
        took_part = {name for each in names for name in each}
        is_alone = len(names) == 1 and len(took_part) == 1
        streams = [self.clients.live[name] for name in took_part & self.clients.live.keys()]
        if streams:
            self._last[epoch.worker_id] = self.world.now, is_alone, streams
        for stream in streams:
            record = self._records.setdefault(stream, _Record())
            if len(stream.tokens) - record.at >= PROVEN_BY:
                record.fatal = record.surely = record.alone = 0
            record.fatal += 1
            record.surely += 1
            record.alone += is_alone
            record.at = len(stream.tokens)

    # ---------------------------------------------------------------- verdicts

    def objection(self, stream: Stream, reason: EndReason) -> str | None:
        if reason is not EndReason.POISON:
            return None
        self.seen(Limit.CONDEMNED)
        if not isinstance(self._event, ev.StepDone):
            # The core reports that it removed the worker only after it has ended the affected requests.
            for epoch in list(self.cluster.epochs.values()):
                if any(stream.name in sent.names for sent in epoch.in_flight):
                    self._died(epoch)
        record = self._records.get(stream, _Record())
        if record.fatal < FATAL_STEPS + FATAL_ALONE:
            return f"it took part in {record.fatal} fatal steps only"
        return None if record.alone >= FATAL_ALONE else f"it ran alone in {record.alone} fatal steps only"

    def admitted(self, stream: Stream, admission: RowAdmission, plan: Plan, epoch: Epoch) -> None:
        record = self._records.get(stream)
        if record is not None:
            record.admitted_with = len(stream.tokens)

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not self._records:
            return
        names = epoch.in_flight[-1].names
        for name in names:
            stream = self.clients.live.get(name)
            record = self._records.get(stream) if stream is not None else None
            if stream is None or record is None:
                continue
            if len(names) == 1:
                if len(stream.tokens) - record.admitted_with > PROBATION:
                    record.clear()
                continue
            if record.surely >= FATAL_STEPS:
                self.seen(Limit.ACQUITTED)
            record.clear()

    def after(self, event: ev.Event, effects: list[ef.Effect]) -> None:
        self._judge_losses()
        if isinstance(event, ev.WorkerHello) and any(isinstance(each, ef.WorkerWelcomed) for each in effects):
            self._came_back(event)

    def _came_back(self, event: ev.WorkerHello) -> None:
        """Handle a worker's hello. If the process is not new, the worker did not die."""
        since, was_alone, streams = self._last.pop(event.worker_id, (0.0, False, []))
        if event.reason is ev.HelloReason.STARTED or self.world.now - since > WITHDRAWABLE_S:
            return
        for stream in streams:
            record = self._records.get(stream)
            if record is not None:
                record.fatal, record.surely = max(0, record.fatal - 1), max(0, record.surely - 1)
                record.alone = max(0, record.alone - was_alone)

    def ended(self, stream: Stream) -> None:
        self._records.pop(stream, None)
