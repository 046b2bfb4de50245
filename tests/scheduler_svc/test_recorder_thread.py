"""Recorder's thread: bounded on disk, harmless when the disk is full, and nearly complete after a SIGKILL."""

import errno
import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from checks.sim.coverage import Coverage
from checks.sim.scenario import draw
from checks.sim.simulation import Simulation
from protos.quire.record.v1 import record_pb2
from quire_server.cli.main import main
from records.reader import read
from records.replay import entries, replay
from scheduler_svc.assembly import open_recorder
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.events import Event, FrontendJoined, RequestArrived, RequestCancelled, TimePassed
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder import recorder as recorder_module
from scheduler_svc.recorder.recorder import Recorder
from scheduler_svc.recorder.segments import Ring, SegmentWriter, paths
from scheduler_svc.recorder.tape import Cut, RecordedScheduler, Tape
from scheduler_svc.segments import SegmentFile
from scheduler_svc.service import SchedulerService
from shared.config import SchedulerConfig
from shared.folder_lock import FolderInUseError
from shared.frames import LINK_MAX_MESSAGE
from shared.request_spec import RequestSpec
from shared.telemetry import Telemetry
from tests.scheduler_svc.test_service import FrontendPeer

PATIENCE_S = 60.0


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"not after {PATIENCE_S} s"
        time.sleep(0.01)


def _recorder(folder: Path, max_bytes: int = 8 << 20) -> Recorder:
    return Recorder(folder, max_bytes=max_bytes, config=CoreConfig(), incarnation=1, release="test")


class _Turning(RecordedScheduler):
    """A core whose every event is a turn of a loop."""

    def __init__(self, config: CoreConfig, incarnation: int, tape: Tape, recorder: Recorder) -> None:
        super().__init__(config, incarnation, tape)
        self._tape_recorder = recorder

    def handle(self, event: Event, now: float) -> list[Effect]:
        self._tape_recorder.turn(self, now)
        # The simulator's loop has no pauses in which the thread could run.
        while len(self._tape.items) > 300 or self._tape_recorder._snapshot_pipe >= 0:
            time.sleep(0.001)
        return super().handle(event, now)


@pytest.mark.every(3)
def test_the_ring_is_bounded_and_each_of_its_segments_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of several times the bound keeps the newest part, within the bound, and replays bit for bit."""
    # The test process is large, so each fork takes long.
    monkeypatch.setattr(recorder_module, "_MAX_FORK_S", float("inf"))
    max_bytes = 1 << 18
    recorders: list[Recorder] = []
    num_plans = 0

    def make_core(config: CoreConfig, incarnation: int) -> Scheduler:
        recorders.append(Recorder(folder, max_bytes=max_bytes, config=config, incarnation=incarnation, release="test"))
        return _Turning(config, incarnation, recorders[-1].tape, recorders[-1])

    # On a busy machine, few segments have a snapshot, perhaps none of those that are kept.
    for seed in range(3, 8):
        folder = tmp_path / str(seed)
        result = Simulation(draw(seed, faults=False), Coverage(), make_core=make_core).run(6000)
        recorders[-1].close()

        assert result.failure is None
        assert recorders[-1].stats.snapshots > 3
        assert sum(path.stat().st_size for path in paths(folder)) <= max_bytes
        outcomes = [replay([segment]) for segment in read(folder) if segment.opening.fresh or segment.snapshot]
        assert [outcome.difference for outcome in outcomes if outcome.difference is not None] == []
        num_plans += sum(outcome.plans for outcome in outcomes)
        if num_plans:
            return
    pytest.fail("no kept segment has a snapshot")


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """The folder has mode 0700 and its files 0600; a second recorder for the folder is refused."""
    folder = tmp_path / "record"
    recorder = _recorder(folder)
    _until(lambda: bool(paths(folder)))

    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    with pytest.raises(FolderInUseError):
        _recorder(folder)
    recorder.close()


def test_schedulers_without_a_port_record_into_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each scheduler takes the first unused folder; the folder of all records lists them."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    opened = [open_recorder(SchedulerConfig(), CoreConfig(), number) for number in (1, 2)]
    recorders = [each for each in opened if each is not None]
    place = tmp_path / "quire" / "record"

    assert [each.folder for each in recorders] == [place / "any", place / "any-2"]
    _until(lambda: all(paths(each.folder) for each in recorders))
    for each in recorders:
        each.close()
    again = open_recorder(SchedulerConfig(), CoreConfig(), 3)
    assert again is not None
    assert again.folder == place / "any"
    again.close()

    assert main(["record", "ls", str(place)]) == 1
    assert capsys.readouterr().err == (
        f"quire record: {place}: no record here; use one of {place}/any, {place}/any-2\n"
    )


@pytest.mark.parametrize("command", [["record", "ls"], ["explain", "--slowest=1", "--record-dir"]])
def test_a_record_that_does_not_exist_is_named(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error has the path, what is wrong with it and what to use, without the number of a system error."""
    missing = tmp_path / "missing"

    assert main([*command, str(missing)]) == 1
    assert capsys.readouterr().err == (
        f"quire {command[0]}: {missing}: no such file or folder; use the folder of a scheduler's --record-dir, or a"
        " file in it\n"
    )


def test_a_full_disk_stops_the_recording_and_not_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk is full the core continues; with room again a new segment begins with a snapshot and replays."""
    monkeypatch.setattr(recorder_module, "_RETRY_S", 0.1)
    recorder = _recorder(tmp_path)
    core = RecordedScheduler(CoreConfig(), 1, recorder.tape)
    times = itertools.count(1)

    def turn() -> bool:
        now = float(next(times))
        recorder.turn(core, now)
        core.handle(TimePassed(), now)
        return True

    _until(lambda: turn() and recorder.stats.entries > 0)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentFile, "append", _full)
        _until(lambda: turn() and not recorder.stats.writes)
    _until(lambda: turn() and recorder.stats.writes)
    before = recorder.stats.entries
    _until(lambda: turn() and recorder.stats.entries > before)
    _until(lambda: turn() and any(segment.snapshot for segment in read(tmp_path)))
    recorder.close()

    outcome = replay(read(tmp_path))
    assert recorder.stats.failures > 0
    assert outcome.difference is None
    assert outcome.calls > 0


def test_a_killed_scheduler_loses_less_than_a_second(tmp_path: Path) -> None:
    """After SIGKILL the record has every call that was made a second before, and replays."""
    folder = tmp_path / "record"
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.scheduler_svc.recorder_to_kill", str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = float(process.stdout.readline())
    last = first
    while last - first < 3:
        last = float(process.stdout.readline())
    process.kill()
    made = [first, last, *map(float, process.stdout.read().split())]
    process.wait()

    recorded = [entry.time for entry in entries(read(folder))]
    assert max(made) - recorded[-1] < 1
    assert replay(read(folder)).difference is None


def test_a_reader_may_wait_until_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor is readable once the tape is on the disk, without waiting for the thread's interval."""
    monkeypatch.setattr(recorder_module, "INTERVAL_S", 3600.0)
    recorder = _recorder(tmp_path)
    core = RecordedScheduler(CoreConfig(), 1, recorder.tape)
    core.handle(TimePassed(), 7.0)

    for is_closed in (False, True):
        if is_closed:
            recorder.close()
        written = recorder.when_written()
        assert select.select([written], [], [], PATIENCE_S)[0] == [written]
        os.close(written)
        assert [entry.time for entry in entries(read(tmp_path))] == [7.0]


def test_a_segment_with_a_failed_write_counts_in_the_ring(tmp_path: Path) -> None:
    """The ring stays within its limit even if segments end with a failed write and have no writer afterwards."""
    max_bytes = 1 << 16
    ring = Ring(tmp_path, max_bytes)
    for _ in range(30):
        writer = ring.begin(None)
        while writer.size < ring.segment_bytes:
            writer.write(record_pb2.Batch(snapshot=os.urandom(1 << 10)))
        writer.close()
    ring.begin(None).close()
    ring.close()

    assert sum(path.stat().st_size for path in paths(tmp_path)) <= max_bytes


def test_a_failed_header_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment whose header cannot be written is deleted, and one of another writer stays."""
    with monkeypatch.context() as patch:
        patch.setattr(SegmentFile, "append", _full)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            SegmentWriter.create(tmp_path / "1.record")
    SegmentWriter.create(tmp_path / "2.record").close()
    with pytest.raises(FileExistsError):
        SegmentWriter.create(tmp_path / "2.record")

    assert [path.name for path in paths(tmp_path)] == ["2.record"]


def _full(_file: SegmentFile, _data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def resting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder whose thread waits until its end; tests run its rounds."""
    monkeypatch.setattr(recorder_module, "INTERVAL_S", 3600.0)
    recorder = _recorder(tmp_path)
    yield recorder
    recorder.close()


def test_a_segment_that_cannot_be_deleted_does_not_end_the_recording(
    resting: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ring cannot make room, this segment ends, and another one is tried later."""

    def refuse(_ring: Ring, _num_bytes: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    core = RecordedScheduler(CoreConfig(), 1, resting.tape)
    resting._round()
    core.handle(TimePassed(), 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Ring, "make_room", refuse)
        resting._round()
    assert not resting.stats.writes
    resting._retry_at = 0.0
    resting._round()
    resting.turn(core, 2.0)
    resting._round()

    assert resting.stats.writes


def test_a_segment_is_asked_for_once(resting: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the loop begins a segment while the thread is in a long round, that round does not request it again."""
    core = RecordedScheduler(CoreConfig(), 1, resting.tape)
    resting._round()
    resting._full_at = 0
    core.handle(TimePassed(), 1.0)
    resting._round()
    core.handle(TimePassed(), 2.0)
    write = SegmentWriter.write

    def write_long(writer: SegmentWriter, batch: record_pb2.Batch) -> None:
        resting.turn(core, 3.0)
        write(writer, batch)

    monkeypatch.setattr(SegmentWriter, "write", write_long)
    resting._round()
    resting.turn(core, 4.0)

    assert sum(isinstance(item, Cut) for item in resting.tape.items) == 1


def test_a_long_fork_waits_until_the_core_is_idle(resting: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """While forks are too long, a segment has a snapshot only if no request is live; its opening says so."""
    core = RecordedScheduler(CoreConfig(), 1, resting.tape)
    core.handle(FrontendJoined(frontend=b"f"), 1.0)
    tokens, spec = np.zeros(2, np.int32), RequestSpec("r", num_prompt_tokens=2, max_tokens=9)
    core.handle(RequestArrived(frontend=b"f", stream=1, spec=spec, token_ids=tokens, credit=1), 1.0)
    resting._round()
    monkeypatch.setattr(recorder_module, "_MAX_FORK_S", -1.0)

    resting._wants_cut = True
    resting.turn(core, 2.0)
    resting.turn(core, 3.0)
    core.handle(RequestCancelled(frontend=b"f", stream=1), 4.0)
    resting._round()
    resting.turn(core, 5.0)
    resting.turn(core, 6.0)

    def is_copied() -> bool:
        resting._round()
        return resting._snapshot_pipe < 0

    _until(is_copied)

    found = [(each.opening.needs_earlier, bool(each.snapshot)) for each in read(resting.folder)]
    assert found == [(False, False), (True, False), (False, True)]


def test_a_recorder_that_is_off_does_not_claim_to_record(resting: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the recorder fell too far behind, a segment still on the tape does not count as recording again."""
    core = RecordedScheduler(CoreConfig(), 1, resting.tape)
    monkeypatch.setattr(recorder_module, "_MAX_BEHIND", 0)
    resting.turn(core, 1.0)
    resting._round()

    assert not resting.stats.writes


def test_clients_do_not_wait_for_the_end_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a shutdown, the last messages reach the front ends before the recorder writes what is left."""
    config = SchedulerConfig(
        frontend_address=f"ipc://{tmp_path}/f", worker_address=f"ipc://{tmp_path}/w", on_stop="end"
    )
    telemetry = Telemetry("test")
    recorder = _recorder(tmp_path / "record")
    service = SchedulerService(config, telemetry, 1, recorder=recorder)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend = FrontendPeer(context, config.frontend_address, "f/1", LINK_MAX_MESSAGE)
    ended: list[int] = []
    close = Recorder.close

    def close_late(closing: Recorder) -> None:
        ended.append(len(frontend.until("ends").ends))
        close(closing)

    monkeypatch.setattr(Recorder, "close", close_late)
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        frontend.hello()
        frontend.submit(1)
        frontend.metrics()  # By now the submission has arrived.
    finally:
        service.stop()
        thread.join()
        frontend.close()
        service.close()
        telemetry.shutdown()
        context.destroy(linger=0)

    assert ended == [1]
