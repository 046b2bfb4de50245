"""What the disk tier promises: blocks come from disk as they went there, and nothing waits for a disk for long."""

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import IndexArray
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob
from scheduler_svc.core.memory.disk_space import DiskSpace
from scheduler_svc.core.memory.host_keys import BlockEntry, CachedBlock
from scheduler_svc.core.memory.swapping import SwapSpace
from scheduler_svc.core.workers.cost_model import StepShape
from scheduler_svc.core.workers.worker import Worker
from shared.columns import to_column
from shared.prefix_keys import KEY_BYTES, BlockKey, following_keys, root_key
from tests.scheduler_svc.cluster import Cluster

ROOT = b"r" * KEY_BYTES


def _key(number: int) -> BlockKey:
    return number.to_bytes(KEY_BYTES, "big")


def _keys(count: int) -> bytes:
    return b"".join(map(_key, range(count)))


def _blocks(*numbers: int) -> IndexArray:
    return np.array(numbers, np.intp)


def _space(num_host: int = 64, num_slots: int = 8) -> SwapSpace:
    """Return a space whose worker has listed an empty disk."""
    space = SwapSpace(num_host, num_disk_blocks=num_slots, caches=True)
    _disk(space).listed((), is_complete=True)
    return space


def _disk(space: SwapSpace) -> DiskSpace:
    assert space.disk is not None
    return space.disk


def _store(space: SwapSpace, *numbers: int) -> IndexArray:
    """Move device blocks with these keys to the host; return the host blocks."""
    cached = [CachedBlock(number, BlockEntry(_key(number), ROOT, not number), None) for number in numbers]
    targets = space.store(cached, last_step=1, answered_step=0).targets
    space.pool.step_answered(1)
    return targets


def _jobs(space: SwapSpace) -> list[DiskJob]:
    """Return the new jobs."""
    disk = _disk(space)
    jobs = disk.outbox.copy()
    disk.outbox.clear()
    return jobs


def _write(space: SwapSpace, *numbers: int) -> None:
    """Move blocks to the host and write them to disk."""
    _store(space, *numbers)
    space.write_to_disk(0.0)
    while jobs := _jobs(space):
        for job in jobs:
            _disk(space).reported(job.copy_id, (), 0.0)
        space.write_to_disk(0.0)


def _validate(space: SwapSpace) -> None:
    space.validate([])


def test_blocks_that_move_to_the_host_are_written() -> None:
    """The job names each block with its key and scope. It holds the host blocks until its report."""
    space = _space()
    host = _store(space, 0, 1, 2)
    space.write_to_disk(0.0)
    (job,) = _jobs(space)

    assert job.action is DiskAction.WRITE
    assert list(job.host_blocks) == host.tolist()
    assert [(block.key, block.root, block.is_first) for block in job.blocks] == [
        (_key(0), ROOT, True), (_key(1), ROOT, False), (_key(2), ROOT, False),
    ]  # fmt: skip
    assert not space.has_room(62)
    assert space.num_held == 0, "a job is not a preempted request"
    _validate(space)
    _disk(space).reported(job.copy_id, (), 0.0)

    assert space.has_room(64)
    assert len(_disk(space).match(_keys(3), 0)) == 3
    _validate(space)


def test_a_block_is_written_only_after_the_copy_to_the_host() -> None:
    """While the step that fills a host block has no result, the block is not written."""
    space = _space()
    space.store([CachedBlock(7, BlockEntry(_key(7), ROOT, False), None)], last_step=1, answered_step=0)
    space.write_to_disk(0.0)
    assert not _jobs(space)
    space.pool.step_answered(1)
    space.write_to_disk(0.0)

    assert len(_jobs(space)) == 1


def test_nothing_is_copied_before_the_worker_has_listed_its_blocks() -> None:
    """A job might otherwise overwrite blocks from before the restart."""
    space = SwapSpace(64, num_disk_blocks=8, caches=True)
    _store(space, 1)
    space.write_to_disk(0.0)
    _disk(space).listed([DiskBlock(3, _key(5), ROOT, False)], is_complete=False)
    space.write_to_disk(0.0)
    assert not _jobs(space)
    _disk(space).listed([DiskBlock(4, _key(6), ROOT, False)], is_complete=True)
    space.write_to_disk(0.0)

    assert len(_jobs(space)) == 1
    assert _disk(space).match(_keys(7), 5).tolist() == [3, 4]
    _validate(space)


def test_strange_entries_of_the_list_are_ignored() -> None:
    """A slot that does not exist, a slot listed twice and a key listed twice do not corrupt the table."""
    space = SwapSpace(64, num_disk_blocks=8, caches=True)
    listed = [
        DiskBlock(3, _key(5), ROOT, False), DiskBlock(3, _key(6), ROOT, False), DiskBlock(8, _key(7), ROOT, False),
        DiskBlock(4, _key(5), ROOT, False),
    ]  # fmt: skip
    _disk(space).listed(listed, is_complete=True)
    _validate(space)

    assert len(_disk(space).keys) == 1


def test_blocks_are_read_to_the_host() -> None:
    """A read block is found in host memory after the report, and stays on disk."""
    space = SwapSpace(64, num_disk_blocks=8, caches=True)
    _disk(space).listed([DiskBlock(slot, _key(slot), ROOT, not slot) for slot in range(3)], is_complete=True)
    slots = _disk(space).match(_keys(3), 0)
    assert space.read_from_disk(slots, _blocks(), until=9.0) == 3
    assert space.read_from_disk(slots, _blocks(), until=9.0) == 0, "they are being read already"
    (job,) = _jobs(space)
    assert job.action is DiskAction.READ
    assert [block.slot for block in job.blocks] == [0, 1, 2]
    assert not len(space.match(_keys(3), 0))
    _validate(space)
    assert _disk(space).reported(job.copy_id, (), 0.0) == 3

    assert space.match(_keys(3), 0).tolist() == list(job.host_blocks)
    assert len(_disk(space).match(_keys(3), 0)) == 3
    _validate(space)


def test_a_failed_read_removes_the_block() -> None:
    """The blocks before and after it are used, and its host block is free again."""
    space = SwapSpace(64, num_disk_blocks=8, caches=True)
    _disk(space).listed([DiskBlock(slot, _key(slot), ROOT, not slot) for slot in range(3)], is_complete=True)
    space.read_from_disk(_disk(space).match(_keys(3), 0), _blocks(), until=9.0)
    (job,) = _jobs(space)
    assert _disk(space).reported(job.copy_id, (1,), 0.0) == 2

    assert len(space.match(_keys(3), 0)) == len(space.match(_keys(3), 2)) == 1
    assert not len(_disk(space).match(_keys(3), 1))
    assert space.has_room(64)
    _validate(space)


def test_requests_do_not_wait_for_a_disk_that_hangs() -> None:
    """A block that is being read counts as awaited until the given time only. The job still holds its blocks."""
    space = SwapSpace(64, num_disk_blocks=8, caches=True)
    _disk(space).listed([DiskBlock(0, _key(0), ROOT, True)], is_complete=True)
    space.read_from_disk(_blocks(0), _blocks(), until=9.0)
    _disk(space).time_passed(8.9)
    assert _disk(space).is_awaited(_key(0))
    _disk(space).time_passed(9.0)

    assert not _disk(space).is_awaited(_key(0))
    assert not space.has_room(64)


def test_a_slot_that_cannot_be_written_does_not_stop_writing() -> None:
    """A slot whose file cannot be replaced is tried again after all other free slots, without a pause."""
    space = _space(num_slots=64)
    disk = _disk(space)
    _store(space, 0, 1)
    space.write_to_disk(0.0)
    (job,) = _jobs(space)
    bad, good = (block.slot for block in job.blocks)
    disk.reported(job.copy_id, [0], 0.0)
    _store(space, *range(2, 40))
    used: list[int] = []
    for _ in range(10):
        space.write_to_disk(0.0)
        for job in _jobs(space):
            used += [block.slot for block in job.blocks]
            disk.reported(job.copy_id, (), 0.0)

    assert len(used) == 38
    assert bad not in used
    assert good not in used
    _validate(space)


def test_writing_pauses_after_a_failure() -> None:
    """A full disk is tried again after a pause, which doubles until a write succeeds."""
    space = _space()
    for now, number in ((0.0, 1), (1.0, 2)):
        _store(space, number)
        space.write_to_disk(now)
        (job,) = _jobs(space)
        _disk(space).reported(job.copy_id, (0,), now)
        assert not len(_disk(space).match(_keys(3), number))
    _store(space, 3)
    space.write_to_disk(2.9)
    assert not _jobs(space)
    space.write_to_disk(3.0)

    assert len(_jobs(space)) == 1
    _validate(space)


def test_the_least_recently_used_slots_are_evicted() -> None:
    """A disk that is full takes new blocks in place of those that were used longest ago."""
    space = _space(num_slots=4)
    _write(space, 1, 2, 3, 4)
    space.read_from_disk(_disk(space).match(_keys(5), 1)[:1], _blocks(), until=9.0)
    for job in _jobs(space):
        _disk(space).reported(job.copy_id, (), 0.0)
    _write(space, 5, 6)

    found = [number for number in range(1, 7) if len(_disk(space).match(_keys(number + 1), number))]
    assert found == [1, 2, 5, 6]
    _validate(space)


@pytest.mark.parametrize("action", [DiskAction.WRITE, DiskAction.READ])
def test_blocks_that_may_be_wrong_leave_the_disk(action: DiskAction) -> None:
    """After a row failed with NaN, no block comes from disk, not even from a job under way. All files are deleted."""
    space = _space()
    _write(space, 0, 1)
    if action is DiskAction.READ:
        space.read_from_disk(_disk(space).match(_keys(2), 0), _blocks(), until=9.0)
    else:
        _store(space, 2)
        space.write_to_disk(0.0)
    (job,) = _jobs(space)
    space.drop_cached()
    (clear,) = _jobs(space)
    assert clear.action is DiskAction.CLEAR
    assert not _disk(space).is_awaited(_key(0))
    _disk(space).reported(job.copy_id, (), 0.0)

    assert not len(_disk(space).keys)
    assert not len(space.keys)
    assert space.has_room(64)
    _validate(space)


def test_an_empty_disk_is_not_cleared() -> None:
    """Every row that fails with NaN drops the cached blocks, so an idle disk gets no job for it."""
    space = _space()
    space.drop_cached()
    assert not _jobs(space)


def test_a_block_on_disk_is_not_lost_when_it_leaves_the_host() -> None:
    """The chance that moved blocks return falls only if a block leaves both tiers."""
    on_disk, without = _space(num_host=8), SwapSpace(8, caches=True)
    _write(on_disk, *range(1, 9))
    _store(without, *range(1, 9))
    for space in (on_disk, without):
        _store(space, *range(11, 19))

    assert on_disk.return_chance == 1.0 > without.return_chance


def test_a_repeated_submission_reads_nothing() -> None:
    """Only the first submission of a request starts reads. The worker lists its blocks between two submissions."""
    prompt = list(range(100, 140))
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=16)
    worker = ModelWorker(b"w/1", 88, 4, 8, num_host_blocks=64, num_disk_blocks=8)
    cluster.join(worker)
    cluster.submit(1, prompt, 5)
    keys = following_keys(root_key("f", b""), to_column(prompt), 4)
    found = tuple(
        DiskBlock(number, keys[number * KEY_BYTES :][:KEY_BYTES], root_key("f", b""), not number) for number in range(8)
    )
    cluster.handle(ev.DiskReported(worker=worker.peer, epoch=worker.epoch, found=found, is_complete=True))

    cluster.effects.clear()
    cluster.submit(1, prompt, 5)
    assert not cluster.effects
    cluster.submit(2, prompt, 5)
    assert [type(effect) for effect in cluster.effects] == [ef.DiskJobWanted]


def _measure_slow_reads(worker: Worker) -> None:
    """Let computing a block of four tokens take 4 ms, and reading it 6 ms."""
    for number in range(400):
        num_tokens = 8 + 8 * (number % 2)
        worker.costs.measured(StepShape(0, num_tokens), num_tokens / 1000)
        worker.costs.reads_measured(1, 0.006)
    assert worker.costs.prompt_token_s == pytest.approx(0.001, rel=0.1)
    assert not worker.costs.may_read(1, 4)


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_slow_disk_is_read_while_other_prompts_wait(is_busy: bool) -> None:
    """Reading a block takes longer than computing it, but not longer than computing the waiting prompts before it."""
    prompt = list(range(100, 140))
    cluster = Cluster(max_num_seqs=8, max_num_batched_tokens=16)
    model = ModelWorker(b"w/1", 88, 4, 8, num_host_blocks=64, num_disk_blocks=8)
    cluster.join(model)
    worker = cluster.core.worker(model.peer)
    assert worker is not None
    _measure_slow_reads(worker)
    keys = following_keys(root_key("f", b""), to_column(prompt), 4)
    found = tuple(
        DiskBlock(number, keys[number * KEY_BYTES :][:KEY_BYTES], root_key("f", b""), not number) for number in range(8)
    )
    cluster.handle(ev.DiskReported(worker=model.peer, epoch=model.epoch, found=found, is_complete=True))
    for stream in range(10, 15) if is_busy else ():
        cluster.submit(stream, [stream] * 40, 5)

    cluster.effects.clear()
    cluster.submit(1, prompt, 5)

    assert [type(effect) for effect in cluster.effects] == [ef.DiskJobWanted] * is_busy


def test_blocks_are_written_while_the_latest_reads_paid() -> None:
    """Blocks are written to a disk that is slower than computing if prompts that wait make reading pay."""
    cluster = Cluster()
    model = ModelWorker(b"w/1", 88, 4, 8, num_host_blocks=64, num_disk_blocks=8)
    cluster.join(model)
    cluster.handle(ev.DiskReported(worker=model.peer, epoch=model.epoch, found=(), is_complete=True))
    worker = cluster.core.worker(model.peer)
    assert worker is not None
    _measure_slow_reads(worker)
    for share, num_written in ((0.5, 4), (0.0, 0)):
        worker.prefixes.read_share = share
        _store(worker.swap, *range(10 * num_written, 10 * num_written + 4))
        worker.prefixes.write_to_disk(0.0)
        assert sum(len(job.blocks) for job in _jobs(worker.swap)) == num_written
