"""Swapping: host memory for the KV of preempted requests, and the copies between host and device.

A plan lists the copies block by block. Swap-outs read the device blocks before the rest of the plan changes them.
Swap-ins are complete before the plan's forward pass. On an accelerator, the copies run on a separate stream, with one
kernel per direction and plan that accesses pinned host memory. A swap-out waits for earlier steps. A step waits for its
plan's swap-ins, but for swap-outs only if it writes blocks that they read. A plan's result is sent when its copies are
complete.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.block_copy import BlockPool, copy_blocks
from worker_svc.device.accelerator import Accelerator, Event
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


_NONE = Copies()


class HostPool:
    """Host blocks, with the layout of the device blocks.

    The keys and the values of each layer are `[num_host_blocks, num_kv_heads, block_size, width]`.
    """

    def __init__(self, caches: Sequence[KVCache], num_host_blocks: int, accelerator: Accelerator | None = None) -> None:
        """Allocate the host blocks for the device blocks `caches`, in pinned memory if there is an accelerator."""
        self._accelerator = accelerator
        self._stream = None if accelerator is None else accelerator.stream()
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

    def swap_out(self, plan: Plan) -> Copies:
        """Start the plan's copies from the device to the host."""
        if plan.swap_out is None:
            return _NONE
        blocks, host_blocks = plan.swap_out.sources, plan.swap_out.targets
        copies, ended = self._copy(self._device, blocks, self._host, host_blocks, after_steps=True)
        if self._accelerator is not None and ended is not None and np.isin(blocks, _written_blocks(plan)).any():
            self._accelerator.wait(ended)
        return copies

    def swap_in(self, plan: Plan) -> Copies:
        """Start the plan's copies from the host to the device."""
        if plan.swap_in is None:
            return _NONE
        host_blocks, blocks = plan.swap_in.sources, plan.swap_in.targets
        copies, ended = self._copy(self._host, host_blocks, self._device, blocks, after_steps=False)
        if self._accelerator is not None and ended is not None:
            self._accelerator.wait(ended)
        return copies

    def _copy(
        self,
        source: BlockPool,
        source_blocks: Int32Array,
        target: BlockPool,
        target_blocks: Int32Array,
        *,
        after_steps: bool,
    ) -> tuple[Copies, Event | None]:
        """Copy blocks; on an accelerator enqueue the copies, and return the event after them.

        With `after_steps`, the copies wait for the steps launched so far. A swap-in need not wait, because it reads
        blocks that the copy stream itself wrote, and no launched step uses the blocks that it writes.
        """
        columns = np.stack((source_blocks, target_blocks)).astype(np.int64)
        if self._accelerator is None or self._stream is None:
            began_ns = time.perf_counter_ns()
            copy_blocks(source, target, torch.from_numpy(columns))
            elapsed = time.perf_counter_ns() - began_ns
            return Copies(len(source_blocks), elapsed_ns=lambda: elapsed), None
        began, ended = self._accelerator.event(), self._accelerator.event()
        if after_steps:
            launched = self._accelerator.event()
            launched.record()
            self._stream.wait(launched)
        with self._stream.current():
            blocks = upload(columns, self._where)
            began.record()
            copy_blocks(source, target, blocks, beside=True)
            ended.record()
        return (
            Copies(len(source_blocks), ended.query, ended.synchronize, lambda: began.ns_until(ended)),
            ended,
        )


def _written_blocks(plan: Plan) -> Int32Array:
    """Return the blocks that the plan may write after its swap-outs: the rows' blocks and the copies' targets."""
    columns = [plan.append_blocks]
    columns += [copies.targets for copies in (plan.block_copies, plan.swap_in) if copies is not None]
    columns += [blocks for admission in plan.admissions for blocks in admission.block_tables]
    return np.concatenate(columns)
