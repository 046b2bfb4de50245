"""Disks of workers: their content survives the worker; they are slow, fail, and lose files.

A disk executes the jobs of the core like a real worker: reads first, and other jobs in order. Every job is checked: it
uses no block or slot that another job or a step uses, a block is written under its own key and scope only, and a slot
is read only for exactly the block that it contains.
"""

import dataclasses
import random
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checks.sim.coverage import Limit
from checks.sim.world import World
from records.rules.model_worker import ModelWorker, Row, Spoil
from records.rules.violation import ViolationError
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.disk import DiskAction, DiskBlock, DiskJob
from shared.prefix_keys import KEY_BYTES, following_keys, root_key

MAX_WAIT_S = 0.5
"""Longest time for which requests wait for a read, with a margin, s."""
_HANG_S = 5.0
"""A job that hangs takes this much longer."""


class Session(Protocol):
    """The parts of an epoch that concern the worker's disk."""

    number: int
    peer: ev.Peer
    model: ModelWorker
    dead_from: float
    is_lost: bool
    jobs: dict[int, tuple[float, DiskJob]]
    """Jobs whose report the core does not have, by ID, with the time of the order."""


@dataclass(frozen=True, slots=True)
class _Fact:
    """What a key stands for."""

    root: bytes
    is_first: bool
    tokens: tuple[int, ...]
    """All tokens up to the end of the block."""
    value: int
    """Value of the sequence up to there."""


@dataclass(slots=True)
class _File:
    """Content of a slot."""

    block: DiskBlock
    values: list[int]
    spoil: Spoil | None
    writer: Row | None
    model: ModelWorker
    """Model of the incarnation that wrote it."""
    is_damaged: bool = False


class Disk:
    """The disk of one worker, through all its incarnations."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._rng = random.Random(f"disk of {world.scenario.seed} {number}")
        self._files: dict[int, _File] = {}
        self._layout: tuple[str, int] = ("", 0)
        self._facts: dict[bytes, _Fact] = {}
        """By key."""
        self._roots: dict[int, bytes] = {}
        """By row: the root of its sequence."""
        self._reads_until = self._others_until = 0.0

    def mount(self, model: ModelWorker) -> None:
        """Start a process with a model. It deletes the files that it cannot use."""
        layout = (model.fingerprint, model.block_size)
        if layout != self._layout:
            self._files.clear()
        self._layout = layout
        self._files = {slot: file for slot, file in self._files.items() if slot < model.num_disk_blocks}

    def begin(self, epoch: Session) -> None:
        """List the files for a core that does not know them, in parts."""
        self._roots.clear()
        if not (epoch.model.num_disk_blocks and epoch.model.num_host_blocks):
            return
        delay = self._latency() + self._duration(1 + len(self._files))
        self._world.agenda.after(delay, self._list, epoch)
        self._reads_until = self._others_until = self._world.now + delay

    def _list(self, epoch: Session) -> None:
        blocks = [file.block for file in self._files.values()]
        self._rng.shuffle(blocks)
        cut = self._rng.randint(0, len(blocks))
        if blocks:
            self._world.coverage.limit(Limit.DISK_LISTED)
        self._report(epoch, ev.DiskReported(worker=epoch.peer, epoch=epoch.number, found=tuple(blocks[:cut])))
        last = ev.DiskReported(worker=epoch.peer, epoch=epoch.number, found=tuple(blocks[cut:]), is_complete=True)
        self._report(epoch, last)

    # ---------------------------------------------------------------- keys

    def admitted(self, row: Row, scope: bytes, model: ModelWorker) -> None:
        """Learn the keys of a row that was just admitted."""
        if model.num_disk_blocks:
            self._roots[row.index] = root_key(model.fingerprint, scope)
            self._learn(row, model)

    def leaves(self, index: int, model: ModelWorker) -> None:
        """Learn the keys of a row that leaves, including its generated tokens."""
        row = model.rows.get(index)
        if row is not None and index in self._roots:
            self._learn(row, model)

    def _learn(self, row: Row, model: ModelWorker) -> None:
        root, size = self._roots[row.index], model.block_size
        keys = following_keys(root, np.array(row.tokens, "<i4").tobytes(), size)
        for number in range(len(keys) // KEY_BYTES):
            key, end = keys[KEY_BYTES * number : KEY_BYTES * (number + 1)], size * (number + 1)
            if key not in self._facts:
                self._facts[key] = _Fact(root, number == 0, tuple(row.tokens[:end]), row.values[end - 1])

    def is_reading_for(self, epoch: Session, tokens: list[int]) -> bool:
        """Return whether a request with these tokens may wait for a read."""
        for ordered, job in epoch.jobs.values():
            if job.action is not DiskAction.READ or self._world.now - ordered > MAX_WAIT_S:
                continue
            facts = (self._facts[block.key] for block in job.blocks)
            if any(list(fact.tokens) == tokens[: len(fact.tokens)] for fact in facts):
                return True
        return False

    # ---------------------------------------------------------------- jobs

    def ordered(self, epoch: Session, job: DiskJob) -> None:
        """Check a job of the core, and execute it later."""
        self._check(epoch, job)
        model, now = epoch.model, self._world.now
        if job.action is not DiskAction.CLEAR:
            epoch.jobs[job.copy_id] = (now, job)
            model.host_in_use.update(dict.fromkeys(job.host_blocks, job.action is DiskAction.READ))
        reads = job.action is DiskAction.READ
        busy_until = self._reads_until if reads else self._others_until
        end = max(now + self._latency(), busy_until) + self._duration(max(1, len(job.blocks)))
        if reads:
            self._reads_until = end
        else:
            self._others_until = end
        self._world.agenda.after(end - now, self._execute, epoch, job, end - max(now, busy_until))

    def _check(self, epoch: Session, job: DiskJob) -> None:
        model = epoch.model
        under_way = [each for _, each in epoch.jobs.values()]
        slots = [block.slot for block in job.blocks]
        if job.copy_id in epoch.jobs or len(job.host_blocks) != len(job.blocks) or len(set(slots)) < len(slots):
            raise ViolationError("disk.job", f"{job}")
        if not all(0 <= slot < model.num_disk_blocks for slot in slots):
            raise ViolationError("disk.job", f"slots {slots} of {model.num_disk_blocks}")
        in_use = {block.slot for each in under_way for block in each.blocks}
        if not in_use.isdisjoint(slots):
            raise ViolationError("disk.fence", f"slots {sorted(in_use.intersection(slots))} are used by two jobs")
        for host_block in job.host_blocks:
            if not 0 <= host_block < model.num_host_blocks:
                raise ViolationError("disk.job", f"host block {host_block} of {model.num_host_blocks}")
            if host_block in model.host_in_use or job.host_blocks.count(host_block) > 1:
                raise ViolationError("disk.fence", f"host block {host_block} is used by two jobs")
            model.check_host_unused(host_block)
        for block in job.blocks:
            fact = self._facts.get(block.key)
            if fact is None or (fact.root, fact.is_first) != (block.root, block.is_first):
                raise ViolationError("disk.key", f"{block} is not a block of any sequence in its scope")

    def _execute(self, epoch: Session, job: DiskJob, seconds: float) -> None:
        world = self._world
        is_over = world.now > epoch.dead_from or epoch.is_lost
        # A process that has died may or may not have deleted its files.
        if job.action is DiskAction.CLEAR and (not is_over or self._rng.random() < 0.5):
            self._files.clear()
        if is_over:
            return
        copy = self._read if job.action is DiskAction.READ else self._write
        blocks = zip(job.blocks, job.host_blocks, strict=True)
        failed = tuple(place for place, each in enumerate(blocks) if not copy(epoch, *each))
        if failed:
            world.coverage.limit(Limit.DISK_FAILED)
        report = ev.DiskReported(
            worker=epoch.peer, epoch=epoch.number, copy_id=job.copy_id, failed=failed, seconds=seconds,
            refused=(("damaged", len(failed)),) if failed else (),
        )  # fmt: skip
        self._report(epoch, report)
        if self._rng.random() < 0.1:
            self._report(epoch, dataclasses.replace(report, epoch=epoch.number - 1))
        if self._rng.random() < 0.1:
            self._report(epoch, report)

    def _write(self, epoch: Session, block: DiskBlock, host_block: int) -> bool:
        values, spoil = epoch.model.host_content(host_block)
        fact = self._facts[block.key]
        if spoil is None and values[-1] != fact.value:
            raise ViolationError("disk.content", f"host block {host_block} is written as another block")
        self._files.pop(block.slot, None)
        if self._fails():
            return False
        writer = epoch.model.host_writer(host_block)
        is_damaged = self._fails()
        self._files[block.slot] = _File(block, values, spoil, writer, epoch.model, is_damaged)
        self._world.coverage.limit(Limit.DISK_WRITTEN)
        return True

    def _read(self, epoch: Session, block: DiskBlock, host_block: int) -> bool:
        file = self._files.get(block.slot)
        if file is None or file.block != block:
            raise ViolationError("disk.block", f"{block} is read, but its slot contains {file and file.block}")
        if file.is_damaged:
            del self._files[block.slot]
            return False
        writer = file.writer
        if writer is not None and file.model is not epoch.model:
            writer = dataclasses.replace(writer, reported_step=None)
        epoch.model.set_host_content(host_block, file.values, file.spoil, writer)
        self._world.coverage.limit(Limit.DISK_READ)
        return True

    def _fails(self) -> bool:
        return self._rng.random() < self._world.scenario.disk.failures

    def _duration(self, num_blocks: int) -> float:
        disk = self._world.scenario.disk
        seconds = disk.block_s * num_blocks * (0.5 + self._rng.random())
        if not self._world.healed and self._rng.random() < disk.hangs:
            seconds += _HANG_S
        return seconds

    def _latency(self) -> float:
        """Draw the latency to the scheduler, without a change to the random numbers of the rest of the simulation."""
        return self._world.scenario.pace.latency * (0.5 + self._rng.random())

    def _report(self, epoch: Session, report: ev.DiskReported) -> None:
        self._world.agenda.after(self._latency(), self._arrive, epoch, report)

    def _arrive(self, epoch: Session, report: ev.DiskReported) -> None:
        if self._world.now <= epoch.dead_from:
            self._world.feed(report)


def ended(epoch: Session, report: ev.DiskReported) -> None:
    """Release what a job has used, when the core gets its report."""
    found = epoch.jobs.pop(report.copy_id, None)
    if found is not None:
        for host_block in found[1].host_blocks:
            del epoch.model.host_in_use[host_block]
