"""Swapping: host memory for the KV of preempted requests, and the copies between host and device.

A plan lists the copies block by block. Swap-outs read the device blocks before the rest of the plan changes them. On an
accelerator, each direction has its own stream, with one or two kernels per plan that access pinned host memory:

* Swap-outs wait for earlier steps. A step waits only for those swap-outs whose blocks its plan writes.
* Swap-ins do not wait for steps. A step waits for swap-ins, of any plan, only if its plan uses their blocks.
* Copies wait for other copies only if they have a block in common.

So a step and the copies of its plan usually overlap. A plan's result is sent when its copies are complete. On a CPU,
all copies are made before the step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.block_copy import BlockPool, copy_blocks
from worker_svc.device.accelerator import Accelerator, Event, Stream
from worker_svc.device.upload import upload
from worker_svc.interface.arrays import Int32Array
from worker_svc.interface.plan import Plan
from worker_svc.memory.disk_tier import HostBytes
from worker_svc.model.base import KVCache


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one plan in one direction."""

    num_blocks: int = 0
    done: Callable[[], bool] = lambda: True
    """Return whether the copies are complete."""
    wait: Callable[[], None] = lambda: None
    """Wait until the copies are complete."""
    elapsed_ns: Callable[[], int] = lambda: 0
    """Return the duration in ns; call when the copies are complete."""
    delay_ns: Callable[[], int] = lambda: 0
    """Return how long the step waited for copies before its forward pass, ns; call when the step is complete."""
    ended: Event | None = None
    """The end of the copies; None if they ended before the step began."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """Copies that may not be complete, each with its blocks."""

    ended: Event
    device_blocks: Int32Array
    host_blocks: Int32Array


class HostPool:
    """Host blocks, with the layout of the device blocks.

    The keys and the values of each layer are `[num_host_blocks, num_kv_heads, block_size, width]`.
    """

    def __init__(self, caches: Sequence[KVCache], num_host_blocks: int, accelerator: Accelerator | None = None) -> None:
        """Allocate the host blocks for the device blocks `caches`, in pinned memory if there is an accelerator."""
        self._accelerator = accelerator
        self._out_stream = None if accelerator is None else accelerator.stream()
        self._in_stream = None if accelerator is None else accelerator.stream()
        self._outs: list[_Pending] = []
        self._ins: list[_Pending] = []
        device = [tensor for pair in caches for tensor in pair]
        host = []
        for tensor in device:
            shape = (num_host_blocks, *tensor.shape[1:])
            if accelerator is None:
                host.append(torch.zeros(shape, dtype=tensor.dtype))
            else:
                host.append(accelerator.pinned_exactly(shape, tensor.dtype))
        self._where = torch.device("cpu") if accelerator is None else accelerator.device
        self._device = BlockPool(device, self._where)
        self._host = BlockPool(host, self._where)

    def host_bytes(self) -> HostBytes:
        """Return a view of the host blocks' bytes, for copies to and from disk."""
        return HostBytes(self._host.tensors)

    def swap_out(self, plan: Plan) -> tuple[Copies, ...]:
        """Start the plan's copies from the device to the host, after which the plan may change its blocks.

        Blocks that the plan itself changes are copied first, so that the step waits only for them.
        """
        self._outs, self._ins = _incomplete(self._outs), _incomplete(self._ins)
        if plan.swap_out is None and not self._ins:
            return ()
        used = _used_blocks(plan)
        waited = self._wait_for(self._ins, used)
        if plan.swap_out is None:
            return waited
        blocks, host_blocks = plan.swap_out.sources, plan.swap_out.targets
        if self._accelerator is None or self._out_stream is None:
            return (self._copy_now(self._device, blocks, self._host, host_blocks),)
        launched = self._accelerator.event()
        launched.record()
        self._out_stream.wait(launched)
        self._order(self._out_stream, self._ins, blocks, host_blocks)
        is_used = np.isin(blocks, used)
        copies: tuple[Copies, ...] = waited
        for part in (is_used, ~is_used):
            if part.any():
                began, ended = self._enqueue(
                    self._out_stream, self._device, blocks[part], self._host, host_blocks[part]
                )
                pending = _Pending(ended, blocks[part], host_blocks[part])
                copies += self._started(pending, began, used)
                self._outs.append(pending)
        return copies

    def swap_in(self, plan: Plan) -> tuple[Copies, ...]:
        """Start the plan's copies from the host to the device."""
        if plan.swap_in is None:
            return ()
        host_blocks, blocks = plan.swap_in.sources, plan.swap_in.targets
        if self._accelerator is None or self._in_stream is None:
            return (self._copy_now(self._host, host_blocks, self._device, blocks),)
        self._order(self._in_stream, self._outs, blocks, host_blocks)
        began, ended = self._enqueue(self._in_stream, self._host, host_blocks, self._device, blocks)
        pending = _Pending(ended, blocks, host_blocks)
        self._ins.append(pending)
        return self._started(pending, began, _used_blocks(plan))

    def _started(self, pending: _Pending, began: Event, used: Int32Array) -> tuple[Copies, ...]:
        """Make the step wait for copies if its plan uses their blocks; return them."""
        ended = pending.ended
        copies = Copies(
            num_blocks=len(pending.device_blocks),
            done=ended.query,
            wait=ended.synchronize,
            elapsed_ns=lambda: began.ns_until(ended),
            ended=ended,
        )
        return (copies, *self._wait_for([pending], used))

    def _wait_for(self, pending: Sequence[_Pending], used: Int32Array) -> tuple[Copies, ...]:
        """Make the step wait for the copies with a block that its plan uses; return the time that it waits."""
        awaited = [each for each in pending if np.isin(each.device_blocks, used).any()]
        if self._accelerator is None or not awaited:
            return ()
        began, ended = self._accelerator.event(), self._accelerator.event()
        began.record()
        for each in awaited:
            self._accelerator.wait(each.ended)
        ended.record()
        return (Copies(delay_ns=lambda: began.ns_until(ended)),)

    @staticmethod
    def _order(stream: Stream, others: Sequence[_Pending], blocks: Int32Array, host_blocks: Int32Array) -> None:
        """Make new copies wait for copies in the other direction with a block in common."""
        for each in others:
            if np.isin(each.device_blocks, blocks).any() or np.isin(each.host_blocks, host_blocks).any():
                stream.wait(each.ended)

    def _enqueue(
        self,
        stream: Stream,
        source: BlockPool,
        source_blocks: Int32Array,
        target: BlockPool,
        target_blocks: Int32Array,
    ) -> tuple[Event, Event]:
        """Enqueue copies on a stream; return the events before and after them."""
        assert self._accelerator is not None
        began, ended = self._accelerator.event(), self._accelerator.event()
        with stream.current():
            blocks = upload(np.stack((source_blocks, target_blocks)).astype(np.int64), self._where)
            began.record()
            copy_blocks(source, target, blocks, beside=True)
            ended.record()
        return began, ended

    @staticmethod
    def _copy_now(source: BlockPool, source_blocks: Int32Array, target: BlockPool, target_blocks: Int32Array) -> Copies:
        """Copy blocks on the CPU, before the step."""
        columns = torch.from_numpy(np.stack((source_blocks, target_blocks)).astype(np.int64))
        began_ns = time.perf_counter_ns()
        copy_blocks(source, target, columns)
        elapsed = time.perf_counter_ns() - began_ns
        return Copies(len(source_blocks), elapsed_ns=lambda: elapsed, delay_ns=lambda: elapsed)


def _incomplete(pending: Sequence[_Pending]) -> list[_Pending]:
    return [each for each in pending if not each.ended.query()]


def _used_blocks(plan: Plan) -> Int32Array:
    """Return the blocks that the plan starts to use: those of new rows, appended blocks, and those of block copies."""
    columns = [plan.append_blocks, plan.append_windows[plan.append_windows >= 0]]
    if plan.block_copies is not None:
        columns += [plan.block_copies.sources, plan.block_copies.targets]
    columns += [blocks for admission in plan.admissions for blocks in admission.block_tables]
    return np.concatenate(columns)
