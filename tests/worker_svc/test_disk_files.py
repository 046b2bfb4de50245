"""What the files of the disk tier promise: a block comes back as it was written, or not at all."""

import errno
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shared.folder_lock import FolderInUseError
from shared.kv_sizes import DISK_HEADER_BYTES as HEADER_BYTES
from worker_svc.interface.disk import DiskAction, DiskBlock, DiskJob, DiskReport
from worker_svc.memory import disk_files, disk_tier
from worker_svc.memory.disk_files import BlockFiles, Refusal, RefusedFileError
from worker_svc.memory.disk_tier import DiskTier, HostBytes

BLOCK_BYTES = 96
IDENTITY = b"i" * 32
BLOCK = DiskBlock(slot=3, key=b"k" * 32, root=b"r" * 32, is_first=True)
CONTENT = bytes(range(BLOCK_BYTES))


def _files(
    folder: Path, *, num_slots: int = 8, identity: bytes = IDENTITY, block_bytes: int = BLOCK_BYTES
) -> BlockFiles:
    return BlockFiles(folder, num_slots=num_slots, block_bytes=block_bytes, identity=identity)


def _written(folder: Path) -> Path:
    """Write `BLOCK`, close the folder, and return the file."""
    files = _files(folder)
    files.write(BLOCK, memoryview(CONTENT))
    files.close()
    return files.folder / "00000003.kv"


def test_a_block_survives_a_restart(tmp_path: Path) -> None:
    """A later process finds the block, with its key, scope and bytes. Others have no access to the file."""
    path = _written(tmp_path / "kv")
    files = _files(tmp_path / "kv")
    into = bytearray(BLOCK_BYTES)

    assert list(files.scan()) == [BLOCK]
    files.read(BLOCK, memoryview(into))
    assert bytes(into) == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def _truncate(path: Path) -> None:
    os.truncate(path, HEADER_BYTES + BLOCK_BYTES - 1)


def _truncate_header(path: Path) -> None:
    os.truncate(path, HEADER_BYTES - 1)


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _change(offset: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, Refusal.TRUNCATED),
        (_truncate_header, Refusal.TRUNCATED),
        (_change(0), Refusal.DAMAGED),
        (_change(8), Refusal.FORMAT),
        (_change(40), Refusal.DAMAGED),
        (_change(120), Refusal.DAMAGED),
    ],
    ids=["shorter", "header only", "magic", "format", "identity", "checksum"],
)
def test_a_damaged_file_is_deleted_at_the_start(
    tmp_path: Path, damage: Callable[[Path], None], reason: Refusal
) -> None:
    """Files whose header or length is wrong are refused before a scheduler learns about them."""
    path = _written(tmp_path)
    damage(path)
    files = _files(tmp_path)

    assert list(files.scan()) == []
    assert files.refused == {reason.value: 1}
    assert not path.exists()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_change(HEADER_BYTES + 7), Refusal.DAMAGED),
        (_truncate, Refusal.TRUNCATED),
        (Path.unlink, Refusal.UNREADABLE),
        (_replace_by_fifo, Refusal.UNREADABLE),
    ],
    ids=["content", "shorter", "deleted", "fifo"],
)
def test_a_file_damaged_later_is_refused_when_it_is_read(
    tmp_path: Path, damage: Callable[[Path], None], reason: Refusal
) -> None:
    """A file that was complete at the start is checked again with every read."""
    path = _written(tmp_path)
    files = _files(tmp_path)
    assert list(files.scan()) == [BLOCK]
    damage(path)

    with pytest.raises(RefusedFileError, match=reason.value):
        files.read(BLOCK, memoryview(bytearray(BLOCK_BYTES)))
    assert files.refused == {reason.value: 1}
    assert not path.exists()


@pytest.mark.parametrize("field", ["key", "root"])
def test_a_file_with_another_block_is_refused(tmp_path: Path, field: str) -> None:
    """A file is read only for exactly its prefix and its cache scope."""
    _written(tmp_path)
    files = _files(tmp_path)
    other = DiskBlock(**{"slot": 3, "key": BLOCK.key, "root": BLOCK.root, "is_first": True, field: b"x" * 32})  # type: ignore[arg-type]

    with pytest.raises(RefusedFileError, match=Refusal.STALE.value):
        files.read(other, memoryview(bytearray(BLOCK_BYTES)))


@pytest.mark.parametrize("change", [{"identity": b"j" * 32}, {"block_bytes": BLOCK_BYTES + 8}])
def test_files_of_another_model_are_deleted(tmp_path: Path, change: dict[str, bytes]) -> None:
    """Blocks of another model, data type or layout are foreign."""
    path = _written(tmp_path)
    files = _files(tmp_path, **change)  # type: ignore[arg-type]

    assert list(files.scan()) == []
    assert files.refused == {Refusal.FOREIGN.value: 1}
    assert not path.exists()


def test_leftovers_are_deleted_and_other_files_stay(tmp_path: Path) -> None:
    """Unfinished files, second files of a block and files beyond the limit are deleted; a stranger's file stays."""
    path = _written(tmp_path)
    (path.parent / "00000004.tmp").write_bytes(b"half")
    (path.parent / "0000ffff.kv").write_bytes(path.read_bytes())
    (path.parent / "00000005.kv").write_bytes(path.read_bytes())
    (path.parent / "notes.txt").write_text("mine")
    files = _files(tmp_path)

    assert [block.key for block in files.scan()] == [BLOCK.key]
    assert files.refused == {Refusal.UNFINISHED.value: 1, Refusal.STALE.value: 2}
    names = sorted(each.name for each in path.parent.iterdir())
    assert len(names) == 3
    assert {"lock", "notes.txt"} < set(names)


def test_a_write_replaces_the_file_of_its_slot(tmp_path: Path) -> None:
    """A slot has one file, so there are never more than `num_slots`."""
    files = _files(tmp_path)
    files.write(BLOCK, memoryview(CONTENT))
    newer = DiskBlock(3, b"n" * 32, BLOCK.root, is_first=False)
    files.write(newer, memoryview(CONTENT[::-1]))

    assert list(files.scan()) == [newer]
    files.clear()
    assert list(files.scan()) == []


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If not all bytes can be written, the write fails and neither the old nor a partial file is left."""
    files = _files(tmp_path)
    files.write(BLOCK, memoryview(CONTENT))

    def full(_descriptor: int, _rest: memoryview) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", lambda _descriptor, parts: len(parts[0]) + 10)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        files.write(BLOCK, memoryview(CONTENT))
    monkeypatch.undo()
    assert [each.name for each in files.folder.iterdir()] == ["lock"]


def test_each_worker_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """A second worker with the same setting gets another subfolder; after the first one ends, its folder is free."""
    first, second = _files(tmp_path), _files(tmp_path)
    assert first.folder != second.folder
    first.close()
    assert _files(tmp_path).folder == first.folder


def test_only_so_many_workers_share_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all subfolders are locked, the worker does not start."""
    monkeypatch.setattr(disk_files, "_MAX_FOLDERS", 1)
    _first = _files(tmp_path)
    with pytest.raises(FolderInUseError, match=str(tmp_path)):
        _files(tmp_path)


# ---------------------------------------------------------------- the thread


def _host() -> tuple[HostBytes, list[torch.Tensor]]:
    tensors = [
        torch.arange(4 * 12, dtype=torch.int16).reshape(4, 2, 6),
        torch.arange(4 * 9, dtype=torch.float64).reshape(4, 9),
    ]
    return HostBytes(tensors), tensors


def _next(tier: DiskTier, until_s: float = 10.0) -> DiskReport:
    """Wait for the next report, and take it."""
    deadline = time.monotonic() + until_s
    while time.monotonic() < deadline:
        report = tier.next_report()
        if report is not None:
            tier.report_sent()
            return report
        time.sleep(0.001)
    raise AssertionError("no report")


def _job(copy_id: int, action: DiskAction, host_block: int, block: DiskBlock = BLOCK) -> DiskJob:
    return DiskJob(copy_id=copy_id, action=action, host_blocks=np.array([host_block], np.int32), blocks=(block,))


def test_a_host_block_comes_back_from_disk(tmp_path: Path) -> None:
    """A block is written in one process and read into another host block in the next, in every layer."""
    host, tensors = _host()
    tier = DiskTier(_files(tmp_path, block_bytes=host.block_bytes), host)
    tier.begin_session()
    assert _next(tier) == DiskReport(is_complete=True)
    tier.submit(_job(1, DiskAction.WRITE, 2))
    assert _next(tier).copy_id == 1
    expected = [tensor[2].clone() for tensor in tensors]
    tier.stop()

    again, tensors = _host()
    for tensor in tensors:
        tensor.zero_()
    tier = DiskTier(_files(tmp_path, block_bytes=host.block_bytes), again)
    tier.begin_session()
    assert _next(tier) == DiskReport(found=(BLOCK,), is_complete=True)
    tier.submit(_job(2, DiskAction.READ, 0))
    report = _next(tier)
    tier.stop()

    assert (report.copy_id, report.failed) == (2, ())
    assert report.duration_ns > 0
    assert all(torch.equal(tensor[0], old) for tensor, old in zip(tensors, expected, strict=True))
    assert not any(tensor[1:].any() for tensor in tensors)


def test_a_refused_block_is_reported_and_host_memory_stays(tmp_path: Path) -> None:
    """If a file is damaged, the report names the block and the reason, and the host block is unchanged."""
    host, tensors = _host()
    files = _files(tmp_path, block_bytes=host.block_bytes)
    tier = DiskTier(files, host)
    tier.begin_session()
    _next(tier)
    tier.submit(_job(1, DiskAction.WRITE, 2))
    _next(tier)
    _change(HEADER_BYTES + 1)(files.folder / "00000003.kv")
    before = [tensor.clone() for tensor in tensors]
    tier.submit(_job(2, DiskAction.READ, 0))
    report = _next(tier)
    tier.stop()

    assert (report.failed, report.refused) == ((0,), {Refusal.DAMAGED.value: 1})
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_jobs_of_an_ended_session_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is under way when the session ends does not reach host memory, and is not reported."""
    host, tensors = _host()
    files = _files(tmp_path, block_bytes=host.block_bytes)
    tier = DiskTier(files, host)
    tier.begin_session()
    _next(tier)
    tier.submit(_job(1, DiskAction.WRITE, 2))
    _next(tier)
    read = files.read

    def read_late(block: DiskBlock, into: memoryview) -> None:
        tier.reset()
        read(block, into)

    monkeypatch.setattr(files, "read", read_late)
    before = [tensor.clone() for tensor in tensors]
    tier.submit(_job(2, DiskAction.READ, 0))
    while tier.is_busy:
        time.sleep(0.001)
    assert tier.next_report() is None
    tier.begin_session()
    assert _next(tier) == DiskReport(found=(BLOCK,), is_complete=True)
    tier.stop()

    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))


def test_a_full_disk_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a write names the blocks that are not on disk, and later sessions do not find them."""
    host, _ = _host()
    files = _files(tmp_path, block_bytes=host.block_bytes)

    def full(_block: DiskBlock, _content: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    tier = DiskTier(files, host)
    tier.begin_session()
    _next(tier)
    tier.submit(_job(1, DiskAction.WRITE, 2))
    assert _next(tier).failed == (0,)
    tier.begin_session()
    assert _next(tier).found == ()
    tier.stop()


def _warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the tier's warnings are added."""
    lines: list[str] = []
    logger = SimpleNamespace(warning=lambda event, **_values: lines.append(event), info=lambda *_, **__: None)
    monkeypatch.setattr(disk_tier, "get_logger", lambda: logger)
    return lines


def test_refused_blocks_are_logged_once_until_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with many damaged files does not flood the log. The next damage after a good block is logged again."""
    lines = _warnings(monkeypatch)
    host, _ = _host()
    files = _files(tmp_path, block_bytes=host.block_bytes)
    tier = DiskTier(files, host)
    tier.begin_session()
    _next(tier)
    logged = []
    for copy_id, is_damaged in enumerate((True, True, False, True)):
        tier.submit(_job(2 * copy_id, DiskAction.WRITE, 2))
        _next(tier)
        if is_damaged:
            _change(HEADER_BYTES + 1)(files.folder / "00000003.kv")
        tier.submit(_job(2 * copy_id + 1, DiskAction.READ, 0))
        assert _next(tier).failed == ((0,) if is_damaged else ())
        logged.append(len(lines))
    tier.stop()

    assert logged == [1, 1, 1, 2]


def test_files_that_cannot_be_deleted_are_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clearing deletes all other files, and the log has one line, however many remain."""
    lines = _warnings(monkeypatch)
    host, _ = _host()
    files = _files(tmp_path, block_bytes=host.block_bytes)
    tier = DiskTier(files, host)
    tier.begin_session()
    _next(tier)
    for slot in range(3):
        tier.submit(_job(slot, DiskAction.WRITE, 2, replace(BLOCK, slot=slot, key=bytes([slot]) * 32)))
        _next(tier)
    unlink = os.unlink

    def partly(path: str) -> None:
        if not path.endswith("00000002.kv"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path)

    monkeypatch.setattr(os, "unlink", partly)
    tier.submit(DiskJob(copy_id=9, action=DiskAction.CLEAR))
    _next(tier)
    tier.stop()

    assert lines == ["blocks on disk not deleted"]
    assert sorted(each.name for each in files.folder.glob("*.kv")) == ["00000000.kv", "00000001.kv"]


def test_clearing_deletes_the_blocks_even_if_the_session_ends(tmp_path: Path) -> None:
    """KV that may be wrong leaves the disk, whatever happens to the connection."""
    host, _ = _host()
    files = _files(tmp_path, block_bytes=host.block_bytes)
    tier = DiskTier(files, host)
    tier.begin_session()
    _next(tier)
    tier.submit(_job(1, DiskAction.WRITE, 2))
    _next(tier)
    tier.submit(DiskJob(copy_id=2, action=DiskAction.CLEAR))
    tier.begin_session()
    while not (report := _next(tier)).is_complete:
        pass
    tier.stop()

    assert report.found == ()
    assert [each.name for each in files.folder.iterdir()] == ["lock"]
