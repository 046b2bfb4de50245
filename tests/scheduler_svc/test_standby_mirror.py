"""Promises of a standby's journal: the standby knows what the leader has sent, however slow or interrupted it is."""

import errno
import math
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from protos.quire.journal.v1.replication_pb2 import JournalPart, PeerMessage, StepDown
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.recovery import Found, to_event
from scheduler_svc.standby import leading, waiting
from scheduler_svc.standby.cursor import PART_BYTES, WINDOW_BYTES, Cursor, Part, Receipt, Replica, replicated
from scheduler_svc.standby.leader_number import NumberFile, Numbers, ReplacedError
from scheduler_svc.standby.leading import Standbys
from scheduler_svc.standby.mirror import GapError, Mirror
from scheduler_svc.standby.peers import PeerLink
from scheduler_svc.standby.tenure import may_stand
from scheduler_svc.standby.waiting import Standby
from shared.columns import to_column
from shared.config import SchedulerConfig
from shared.pulse import Pulse
from shared.request_spec import RequestSpec
from shared.sockets import wait_readable
from tests.scheduler_svc.test_journal import Known, Written, _known


class Copy:
    """A standby's folder and its place in the leader's journal."""

    def __init__(self, written: Written, folder: Path) -> None:
        self._written, self._folder = written, folder
        self._cursor = Cursor()
        self._mirror = Mirror(folder, syncs=False)

    def transmit(self, most: int) -> int:
        """Send and acknowledge at most this many parts; return their number."""
        for count in range(most):
            extents = self._written.journal.extents
            part = self._cursor.next_part(extents)
            if part is None:
                return count
            path = self._written.journal.path(part.segment)
            with path.open("rb") as file:
                data = os.pread(file.fileno(), part.num_bytes, part.offset)
            self._mirror.write(_message(part, data, oldest=next(iter(extents))))
            if count % 3:
                self._mirror.apply()
            self._cursor.sent_part(part, extents)
            self._cursor.acknowledged = self._cursor.sent
        return most

    def start_over(self) -> None:
        """The standby has lost its connection, and says hello."""
        self._cursor = Cursor()

    def restart(self) -> None:
        """The standby's process starts again."""
        self._mirror.close()
        self._mirror, self._cursor = Mirror(self._folder, syncs=True), Cursor()

    def take_over(self) -> Known:
        """Return what the standby knows if it leads now, which is what its folder contains, now and later."""
        found = self._mirror.found()
        self._mirror.close()
        known = self._read(found)
        assert self._read(None) == known
        return known

    def _read(self, found: Found | None) -> Known:
        journal = Journal(
            self._folder, max_bytes=1 << 20, keep_s=300.0, clock_ms=lambda: 1_000_000, reports=False, found=found
        )
        known = _known(journal.restored.logs)
        journal.close()
        return known


def _message(part: Part, data: bytes, oldest: int) -> JournalPart:
    return JournalPart(
        segment=part.segment,
        offset=part.offset,
        data=data,
        starts_over=part.starts_over,
        is_complete=part.is_complete,
        oldest_segment=oldest if part.is_complete else 0,
    )


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(12))
def test_a_standby_knows_a_state_of_the_leader(tmp_path: Path, seed: int) -> None:
    """A standby that takes over knows what the leader knew when the standby last had the whole journal, or later.

    The standby is slow, loses its connection, and starts again, while the leader deletes segments.
    """
    rng = random.Random(seed)
    written = Written(tmp_path / "leader", seed=seed, max_bytes=6000)
    copy = Copy(written, tmp_path / "standby")
    states: list[Known] = []
    complete_at = -1
    for _ in range(400):
        written.act()
        written.end_turn()
        states.append(_known(to_event(written.journal._book, 0).logs))
        match rng.randrange(12):
            case 0:
                copy.start_over()
            case 1 if rng.random() < 0.3:
                copy.restart()
            case 2 | 3 | 4 | 5 | 6:
                most = rng.randrange(1, 30)
                if copy.transmit(most) < most:
                    complete_at = len(states) - 1
    known = copy.take_over()
    assert complete_at >= 0
    assert known in states[complete_at:]


def test_a_leader_that_dies_during_the_first_copy_costs_nothing(tmp_path: Path) -> None:
    """Until the copy is complete, a standby keeps what it knew before."""
    earlier = Written(tmp_path / "standby", seed=1)
    for _ in range(60):
        earlier.act()
        earlier.end_turn()
    before = _known(to_event(earlier.journal._book, 0).logs)
    earlier.journal.close()
    written = Written(tmp_path / "leader", seed=2, max_bytes=6000)
    for _ in range(200):
        written.act()
        written.end_turn()
    copy = Copy(written, tmp_path / "standby")
    assert len(written.journal.extents) > 2
    copy.transmit(2)

    assert copy.take_over() == before


def test_a_gap_is_refused(tmp_path: Path) -> None:
    """A part that does not follow the last one is not written."""
    mirror = Mirror(tmp_path, syncs=False)
    with pytest.raises(GapError):
        mirror.write(JournalPart(segment=3, offset=0, data=b"QUIREJ\0\1"))
    mirror.write(JournalPart(segment=3, offset=0, data=b"QUIREJ\0\1", starts_over=True))
    with pytest.raises(GapError):
        mirror.write(JournalPart(segment=3, offset=9, data=b"x"))
    with pytest.raises(GapError):
        mirror.write(JournalPart(segment=2, offset=0, data=b"x"))
    mirror.close()


def test_a_standby_that_acknowledges_nothing_gets_a_bounded_amount() -> None:
    """The window limits what is on the way, whatever the journal contains."""
    cursor, extents = Cursor(), {1: 10 * WINDOW_BYTES}
    total = 0
    while (part := cursor.next_part(extents)) is not None:
        assert part.num_bytes <= PART_BYTES
        cursor.sent_part(part, extents)
        total += part.num_bytes
    assert total == WINDOW_BYTES
    cursor.acknowledged = PART_BYTES
    assert cursor.next_part(extents) == Part(1, WINDOW_BYTES, PART_BYTES, starts_over=False, is_complete=False)


def test_a_standby_starts_over_if_the_leader_deleted_what_it_lacks() -> None:
    """A deleted segment does no harm to a standby that has it completely."""
    cursor = Cursor()
    cursor.sent_part(Part(1, 0, 100, starts_over=True, is_complete=False), {1: 100, 2: 50})
    assert cursor.next_part({2: 50}) == Part(2, 0, 50, starts_over=False, is_complete=True)
    assert cursor.next_part({3: 70}) == Part(3, 0, 70, starts_over=True, is_complete=True)
    behind = Cursor()
    behind.sent_part(Part(1, 0, 60, starts_over=True, is_complete=False), {1: 100, 2: 50})
    assert behind.next_part({2: 50}) == Part(2, 0, 50, starts_over=True, is_complete=True)


def test_a_token_waits_for_each_standby_that_has_the_whole_journal() -> None:
    """Any of them may take over. A standby that is late, or has only a part, delays nothing."""
    standbys = [Replica(), Replica(), Replica()]
    for standby, copy in zip(standbys[:2], (11, 12), strict=True):
        standby.start_over(copy)
        standby.sent(Part(1, 0, 100, starts_over=True, is_complete=True), {1: 100}, 100, 0.0)
        standby.acknowledge(100, copy, 0.0)
        standby.sent(Part(1, 100, 50, starts_over=False, is_complete=True), {1: 150}, 150, 1.0)
    standbys[0].acknowledge(150, 11, 1.0)
    standbys[1].acknowledge(150, 11, 1.0)
    assert replicated(standbys) == 100

    assert not standbys[1].give_up(2.0)
    assert standbys[1].give_up(3.0)

    assert replicated(standbys) == 150


def test_a_late_standby_delays_tokens_again_only_when_it_has_caught_up() -> None:
    """Acknowledgements that are late all the time do not make tokens wait."""
    standby = Replica()
    standby.start_over(11)
    for second in range(5):
        part = Part(1, 100 * second, 100, starts_over=not second, is_complete=True)
        standby.sent(part, {1: 100 * second + 100}, 100 * second + 100, float(second))
    standby.acknowledge(100, 11, 1.0)
    assert standby.give_up(3.0)

    standby.acknowledge(200, 11, 4.0)
    assert replicated([standby]) == math.inf
    standby.acknowledge(400, 11, 4.5)
    assert replicated([standby]) == 400


def test_a_standby_notices_that_the_last_part_of_a_segment_is_missing() -> None:
    """The next segment begins at 0 in any case. The parts that follow are refused until a copy starts over."""
    receipt = Receipt()
    assert receipt.belongs(7, starts_over=True)
    assert receipt.follows(0)
    receipt.num_bytes = 100

    assert not receipt.follows(150)

    assert not receipt.follows(100)
    assert not receipt.belongs(8, starts_over=False)
    assert receipt.belongs(8, starts_over=True)
    assert receipt.follows(0)


def test_a_scheduler_stands_for_the_lease_only_if_it_has_the_journal_of_the_last_leader() -> None:
    """The copy of an earlier leader's journal does not count. After the grace period, any standby may stand."""
    known = Numbers(own=3, highest=5)
    assert may_stand(known, 5, silence_s=0.0, grace_s=4.0)
    assert may_stand(known.led(6), 0, silence_s=0.0, grace_s=4.0)
    assert may_stand(Numbers(), 0, silence_s=0.0, grace_s=4.0)

    assert not may_stand(known, 4, silence_s=4.0, grace_s=4.0)

    assert may_stand(known, 4, silence_s=4.1, grace_s=4.0)


def test_a_scheduler_that_was_replaced_does_not_lead_after_a_restart(tmp_path: Path) -> None:
    """Each takeover has a higher number, which the files of both schedulers keep."""
    first, second = NumberFile(tmp_path / "a"), NumberFile(tmp_path / "b")
    number = first.read().to_start(1_000)
    first.write(first.read().led(number))
    assert (number, first.read().to_start(9_000)) == (1_000, 1_000)
    successor = second.read().seen(number).to_take_over(500)
    second.write(second.read().seen(number).led(successor))
    assert successor > number

    first.write(first.read().seen(successor))

    assert first.read() == Numbers(1_000, successor)
    with pytest.raises(ReplacedError, match="--standby-of"):
        first.read().to_start(99_000)
    assert first.read().to_take_over(500) > successor
    assert second.read().to_start(99_000) == successor


def test_a_slow_standby_completes_its_first_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a long copy takes longer than the leader may be silent, but the standby does not begin again."""
    apply = Mirror.apply

    def slowly(mirror: Mirror) -> None:
        time.sleep(0.1)
        apply(mirror)

    monkeypatch.setattr(Mirror, "apply", slowly)
    copies: list[int] = []
    start_over = Replica.start_over

    def counted(replica: Replica, copy: int) -> None:
        copies.append(copy)
        start_over(replica, copy)

    monkeypatch.setattr(Replica, "start_over", counted)
    journal = Journal(tmp_path / "leader", max_bytes=1 << 30, keep_s=60.0)
    prompt = to_column(np.arange(100_000))
    for stream in range(1, 21):
        spec = RequestSpec(f"r{stream}", 100_000, 9, identity=b"%016d" % stream)
        journal.note(ef.LogBegun(frontend=b"f/1", stream=stream, spec=spec, tokens=prompt, scores=()))
        journal.commit()
    with _replication(tmp_path) as (leader, _):
        _replicate(leader, journal, lambda: leader.stats(journal).ready == 1)

        assert leader.stats(journal).dropped == 0
        assert len(copies) == 1
    journal.close()


def test_a_standby_whose_disk_was_full_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for another copy until it can write one, even if the next part begins a segment."""
    written = Written(tmp_path / "leader", seed=3, max_bytes=6000)
    journal = written.journal
    write, is_full = Mirror.write, threading.Event()

    def limited(mirror: Mirror, part: JournalPart) -> None:
        if is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(mirror, part)

    monkeypatch.setattr(Mirror, "write", limited)
    with _replication(tmp_path) as (leader, standby):
        _replicate(leader, journal, lambda: leader.stats(journal).ready == 1)
        is_full.set()
        _turn(written)
        _replicate(leader, journal, lambda: standby._receipt.is_broken)
        is_full.clear()
        segment = max(journal.extents)
        while max(journal.extents) == segment:
            _turn(written)
        _replicate(leader, journal, lambda: not standby._receipt.is_broken and leader.acknowledged() == journal.written)

        standby.stop()
    copied = Journal(tmp_path / "standby", max_bytes=1 << 20, keep_s=300.0, clock_ms=lambda: 1_000_000, reports=False)
    assert _known(copied.restored.logs) == _known(to_event(journal._book, 0).logs)
    copied.close()
    journal.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder of a standby on a file system of 64 KiB."""
    folder = tmp_path / "standby"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_standby_with_a_full_disk_pauses_longer_before_each_copy(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It logs this once, removes what it has of the copy, and has the journal when there is space again."""
    lines: list[str] = []
    monkeypatch.setattr(waiting.log, "error", lambda event, **_: lines.append(event))
    pauses: list[float] = []
    fail = Standby._fail

    def counted(standby: Standby, error: Exception, now: float) -> None:
        fail(standby, error, now)
        pauses.append(standby._pause_s)

    monkeypatch.setattr(Standby, "_fail", counted)
    journal = Journal(tmp_path / "leader", max_bytes=1 << 30, keep_s=60.0)
    prompt = to_column(np.arange(50_000))
    journal.note(ef.LogBegun(frontend=b"f/1", stream=1, spec=RequestSpec("r", 50_000, 9, identity=b"%016d" % 1),
                             tokens=prompt, scores=()))  # fmt: skip
    journal.commit()
    with _replication(tmp_path) as (leader, standby):
        _replicate(leader, journal, lambda: len(pauses) == 3)

        assert pauses == [0.25, 0.5, 1.0]
        assert len(lines) == 1
        assert leader.stats(journal).copies == 3
        assert leader.stats(journal).ready == 0
        assert not list((small_disk / "incoming").glob("*"))
        subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
        _replicate(leader, journal, lambda: leader.stats(journal).ready == 1)
        assert standby._pause_s == 0
    journal.close()


def _turn(written: Written) -> None:
    """Let something be written."""
    before = written.journal.written
    while written.journal.written == before:
        written.act()
        written.end_turn()


@contextmanager
def _replication(folder: Path) -> Iterator[tuple[Standbys, Standby]]:
    """Yield a leader, and a standby that runs in a thread."""
    config = SchedulerConfig(journal=f"{folder}/standby", standby_of=f"ipc://{folder}/s")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = Standbys(context, address=config.standby_of, others=(), number=5)
    standby = Standby(context, config, Numbers())
    thread = threading.Thread(target=standby.run, args=(Pulse(),))
    thread.start()
    try:
        yield leader, standby
    finally:
        standby.stop()
        thread.join()
        standby.close()
        leader.close()
        context.destroy(linger=0)


def _replicate(leader: Standbys, journal: Journal, holds: Callable[[], bool]) -> None:
    """Run the leader's side until a condition holds."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        leader.read(time.monotonic())
        leader.send(journal, time.monotonic(), num_workers=0)
        wait_readable(leader.sockets, 0.01)


def test_a_scheduler_that_was_stopped_waits_for_the_announcement_after_a_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proposal is old: its sender may lead already, so the scheduler says nothing if it hears that in time."""
    monkeypatch.setattr(leading, "_LISTEN_S", 60.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    leader = Standbys(context, address=f"ipc://{tmp_path}/s", others=(), number=5)
    other = PeerLink(context, f"ipc://{tmp_path}/s", lambda _socket: None)
    while not other.send(PeerMessage(step_down=StepDown(leader_number=6, leads=False))):
        assert other.socket.poll(60_000, zmq.POLLOUT), "no connection"
    end = time.monotonic() + 60
    while not leader.successor:
        assert time.monotonic() < end
        wait_readable(leader.sockets, 1)
        leader.read(time.monotonic())

    assert other.send(PeerMessage(step_down=StepDown(leader_number=6, leads=True)))
    leader.listen()

    assert leader.must_be_silent
    other.close()
    leader.close()
    context.term()
