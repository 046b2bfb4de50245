"""Recorder's thread: bounded on disk, harmless when the disk is full, and nearly complete after a SIGKILL."""

import errno
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.events import Event, TimePassed
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.recorder import recorder as recorder_module
from scheduler_svc.recorder.reader import read
from scheduler_svc.recorder.recorder import Recorder
from scheduler_svc.recorder.replay import entries, replay
from scheduler_svc.recorder.segments import RecordInUseError, SegmentWriter, paths
from scheduler_svc.recorder.tape import RecordedScheduler, Tape
from scheduler_svc.sim.coverage import Coverage
from scheduler_svc.sim.scenario import draw
from scheduler_svc.sim.simulation import Simulation

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
        # The simulator's loop takes no pauses in which the thread could work.
        while len(self._tape.items) > 300 or self._tape_recorder._snapshot_pipe >= 0:
            time.sleep(0.001)
        return super().handle(event, now)


def test_the_ring_is_bounded_and_each_of_its_segments_replays(tmp_path: Path) -> None:
    """A record of several times the bound keeps the newest part, within the bound, and replays bit for bit."""
    max_bytes = 1 << 18
    recorders: list[Recorder] = []

    def make_core(config: CoreConfig, incarnation: int) -> Scheduler:
        recorders.append(
            Recorder(tmp_path, max_bytes=max_bytes, config=config, incarnation=incarnation, release="test")
        )
        return _Turning(config, incarnation, recorders[-1].tape, recorders[-1])

    result = Simulation(draw(3, faults=False), Coverage(), make_core=make_core).run(6000)
    (recorder,) = recorders
    recorder.close()

    assert result.failure is None
    assert recorder.stats.snapshots > 3
    assert sum(path.stat().st_size for path in paths(tmp_path)) <= max_bytes
    outcomes = [replay([segment]) for segment in read(tmp_path) if segment.opening.fresh or segment.snapshot]
    assert outcomes  # few segments have a snapshot if the machine is busy
    assert [outcome.difference for outcome in outcomes if outcome.difference is not None] == []
    assert sum(outcome.plans for outcome in outcomes) > 100


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    """The folder has mode 0700 and its files 0600; a second recorder of the folder is refused."""
    folder = tmp_path / "record"
    recorder = _recorder(folder)
    _until(lambda: bool(paths(folder)))

    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    with pytest.raises(RecordInUseError):
        _recorder(folder)
    recorder.close()


def test_a_full_disk_stops_the_recording_and_not_the_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the disk is full the core goes on; with room again a new segment begins with a snapshot, and replays."""
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

    def full(_writer: SegmentWriter, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "_append", full)
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
