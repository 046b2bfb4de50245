"""Leader and standbys in the simulation of leases: parts of the journal, acknowledgements, announcements."""

from collections.abc import Callable

from checks.sim.leadership.events import BrokenPromiseError, Events
from checks.sim.leadership.models import DURATION_S, Lead, Process, Record
from scheduler_svc.standby import tenure
from scheduler_svc.standby.cursor import TIMEOUT_S, Part, Replica

_TICK_S = 0.25
_SILENCE_S = 1.5
GRACE_S = 2 * DURATION_S


class Replication:
    """Replication between all schedulers.

    Args:
        events: time and network.
        processes: the schedulers.
        step_down: makes a scheduler stop leading.
    """

    def __init__(self, events: Events, processes: list[Process], step_down: Callable[[Process], None]) -> None:
        self._events, self._processes, self._step_down = events, processes, step_down
        self.starts_over = 0
        """Number of copies that were begun."""

    def begin(self, process: Process) -> None:
        """Let a process that has started wait as a standby."""
        process.leader, process.heard_at = -1, process.clock(self._events.now)
        process.copy.restart()
        process.parts.clear()
        self._events.do(process, 0.0, lambda: self._wait(process))

    # ---------------------------------------------------------------- leader

    def to_send(self, process: Process, lead: Lead) -> list[Callable[[], None]]:
        """Return what a leader sends to the other schedulers in a turn."""
        now, sends = process.clock(self._events.now), []
        for index, replica in lead.replicas.items():
            sends += self._parts(process, lead, index, replica, now)
        if now - lead.ticked_at >= _TICK_S:
            lead.ticked_at = now
            for index in list(lead.replicas):
                if now - lead.heard_at[index] > TIMEOUT_S:
                    del lead.replicas[index]
                elif not lead.replicas[index].give_up(now):
                    sends.append(self._heartbeat(process, index))
            sends += [self._announcement(process, each) for each in self._processes if each is not process]
        return sends

    def _parts(
        self, process: Process, lead: Lead, index: int, replica: Replica, now: float
    ) -> list[Callable[[], None]]:
        sends, extents = [], lead.journal.extents
        while (part := replica.cursor.next_part(extents)) is not None:
            if part.starts_over:
                replica.start_over(1 + self._events.rng.getrandbits(48))
                self.starts_over += 1
            sends.append(self._part(process, lead, index, part, replica, lead.journal.read(part)))
            replica.sent(part, extents, lead.journal.written, now)
        return sends

    def _part(
        self, process: Process, lead: Lead, index: int, part: Part, replica: Replica, records: list[Record]
    ) -> Callable[[], None]:
        copy, position = replica.copy, replica.position(part)
        standby, number, log, length = self._processes[index], process.tenure.number, lead.log, len(lead.log)

        def write() -> None:
            is_written = self._write(standby, process, number, part, (copy, position), records)
            if is_written and part.is_complete and standby.copy.tokens != log[:length]:
                raise BrokenPromiseError(f"copy: scheduler {standby.index} has other tokens than its leader")

        def arrive() -> None:
            standby.parts.append(write)
            if len(standby.parts) == 1:
                self._events.do(standby, standby.slow_s, lambda: self._write_next(standby))

        return lambda: self._events.transmit(process, standby, arrive)

    def _heartbeat(self, process: Process, index: int) -> Callable[[], None]:
        standby, number = self._processes[index], process.tenure.number
        return lambda: self._events.transmit(process, standby, lambda: self._hear(standby, process.index, number))

    def _announcement(self, process: Process, other: Process) -> Callable[[], None]:
        number = process.tenure.number

        def hear() -> None:
            other.numbers = other.numbers.seen(number)
            self._decide(other)
            if other.lease and other.tenure.number < number:
                self._step_down(other)

        return lambda: self._events.transmit(process, other, hear)

    def _acknowledge(self, process: Process, standby: Process, num_bytes: int, copy: int) -> None:
        lead = process.lead
        if lead is None:
            return
        if standby.index not in lead.replicas:
            self._events.transmit(process, standby, lambda: setattr(standby, "leader", -1))
            return
        lead.heard_at[standby.index] = process.clock(self._events.now)
        lead.replicas[standby.index].acknowledge(num_bytes, copy, process.clock(self._events.now))

    def _hello(self, process: Process, standby: Process) -> None:
        if process.lead is not None:
            process.lead.replicas[standby.index] = Replica()
            process.lead.heard_at[standby.index] = process.clock(self._events.now)

    # ---------------------------------------------------------------- standby

    def _wait(self, standby: Process) -> None:
        """Run a tick of a standby."""
        self._events.do(standby, _TICK_S, lambda: self._wait(standby))
        if standby.lease:
            return
        if standby.clock(self._events.now) - standby.heard_at > _SILENCE_S:
            standby.leader = -1
        self._decide(standby)
        if standby.leader >= 0 and not standby.copy.receipt.is_broken:
            self._send_acknowledgement(standby, self._processes[standby.leader])
            return
        for other in self._processes:
            if other is not standby:
                self._events.transmit(standby, other, lambda other=other: self._hello(other, standby))  # type: ignore[misc]

    def _decide(self, standby: Process) -> None:
        """Decide whether a standby tries to acquire the lease."""
        silence_s = standby.clock(self._events.now) - standby.heard_at
        copied = standby.copy.number if standby.copy.is_complete else 0
        stands = tenure.may_stand(standby.numbers, copied, silence_s=silence_s, grace_s=GRACE_S)
        standby.standing = standby.numbers.highest if stands else None

    def _hear(self, standby: Process, leader: int, number: int) -> bool:
        is_highest = number >= standby.numbers.highest
        standby.numbers = standby.numbers.seen(number)
        if standby.lease or not is_highest:
            return False
        standby.heard_at, standby.leader = standby.clock(self._events.now), leader
        self._decide(standby)
        return True

    def _write_next(self, standby: Process) -> None:
        """Write one part after the other."""
        standby.parts[0]()
        self._decide(standby)
        standby.parts.popleft()
        if standby.parts:
            self._events.do(standby, standby.slow_s, lambda: self._write_next(standby))

    def _write(
        self,
        standby: Process,
        process: Process,
        number: int,
        part: Part,
        place: tuple[int, int],
        records: list[Record],
    ) -> bool:
        """Write a part; `place` is the number of its copy and its position there. Return whether it was written."""
        if not self._hear(standby, process.index, number):
            return False
        copy, receipt = standby.copy, standby.copy.receipt
        if part.starts_over:
            copy.number = number
        if not receipt.belongs(place[0], starts_over=part.starts_over) or receipt.is_broken:
            return False
        if not receipt.follows(place[1]) or not copy.write(part, records):
            receipt.is_broken, copy.number = True, 0
            return False
        receipt.num_bytes += part.num_bytes
        self._send_acknowledgement(standby, process)
        return True

    def _send_acknowledgement(self, standby: Process, process: Process) -> None:
        num_bytes, copy = standby.copy.receipt.num_bytes, standby.copy.receipt.copy
        self._events.transmit(standby, process, lambda: self._acknowledge(process, standby, num_bytes, copy))
