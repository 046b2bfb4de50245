"""The simulated disk runs one job at a time, reads first, and learns its times from jobs that did not wait."""

import pytest

from records.whatif.disk import DiskSample, DiskTimes, SimulatedDisk, StepClock, assumed, learn
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob


def _job(copy_id: int, action: DiskAction, num_blocks: int = 2) -> DiskJob:
    blocks = tuple(DiskBlock(slot, b"", b"", False) for slot in range(num_blocks))
    return DiskJob(copy_id=copy_id, action=action, host_blocks=tuple(range(num_blocks)), blocks=blocks)


def test_reads_overtake_waiting_writes_but_not_the_one_in_progress() -> None:
    disk = SimulatedDisk(DiskTimes(read_s=1.0, write_s=2.0))
    for copy_id, action in ((1, DiskAction.WRITE), (2, DiskAction.WRITE), (3, DiskAction.READ)):
        disk.order(_job(copy_id, action))
        if copy_id == 1:
            assert disk.start() == (_job(1, DiskAction.WRITE), 4.0)
    assert disk.start() is None
    disk.ended()

    assert disk.start() == (_job(3, DiskAction.READ), 2.0)


def test_a_worker_handles_messages_at_the_end_of_the_step_in_progress() -> None:
    """If two steps follow each other, messages are handled between them. Without a step, they are handled at once."""
    clock = StepClock()
    clock.add(1.0, 3.0)
    clock.add(3.0, 4.0)

    assert [clock.boundary(now) for now in (0.5, 1.5, 3.0, 3.5, 4.0)] == [0.5, 3.0, 4.0, 4.0, 4.0]


def test_the_latency_is_learned_from_jobs_that_did_not_wait() -> None:
    samples = [DiskSample(True, 2, 0.2, 0.3, waited=False), DiskSample(False, 1, 0.3, 9.0, waited=True)]

    times = learn(samples)

    assert times is not None
    assert times.read_s == pytest.approx(0.1)
    assert times.write_s == pytest.approx(0.3)
    assert times.latency_s == pytest.approx(0.1)


def test_without_reads_a_read_takes_as_long_as_a_write() -> None:
    times = learn([DiskSample(False, 2, 0.2, 0.2, waited=True)])

    assert times == DiskTimes(read_s=0.1, write_s=0.1, latency_s=0.0)
    assert learn([]) is None
    assert assumed(3_000_000).read_s == pytest.approx(1e-3)
