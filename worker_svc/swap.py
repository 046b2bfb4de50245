"""Host memory for the KV of paused requests, and the copies between it and the device.

A plan names the copies block by block; swap-outs read before anything else of the plan touches the device blocks,
swap-ins are there before its forward pass. On an accelerator the copies run on a stream of their own beside the steps:
one kernel per direction and plan, which reads and writes pinned host memory itself. What must wait for what, the
streams are told: a swap-out begins after the steps launched before it, a step waits for its plan's swap-ins, and for
its plan's swap-outs only when it writes blocks that they read. A plan is answered when its copies are done, too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.block_copy import BlockPool, copy_blocks
from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array, MalformedColumnError, from_column, from_columns
from worker_svc.accelerator import Accelerator, Event
from worker_svc.device import upload
from worker_svc.errors import PlanError
from worker_svc.model.base import KVCache


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of one plan in one direction."""

    num_blocks: int = 0
    done: Callable[[], bool] = lambda: True
    """Whether they are made."""
    wait: Callable[[], None] = lambda: None
    """Waits until they are."""
    elapsed_ns: Callable[[], int] = lambda: 0
    """How long they took; to be asked once they are done."""


_NONE = Copies()


class HostPool:
    """The host's blocks, laid out like the device's: `[num_host_blocks, num_kv_heads, block_size, head_dim]` per layer,
    keys and values apart."""

    def __init__(self, caches: Sequence[KVCache], num_host_blocks: int, accelerator: Accelerator | None = None) -> None:
        """`caches` are the device's; the host's memory is allocated here, pinned if there is an accelerator."""
        self._num_host_blocks = num_host_blocks
        self._accelerator = accelerator
        self._stream = None if accelerator is None else accelerator.stream()
        device = [tensor for pair in caches for tensor in pair]
        self._num_blocks = len(device[0]) if device else 0
        host = []
        for tensor in device:
            shape = (num_host_blocks, *tensor.shape[1:])
            if accelerator is None:
                host.append(torch.zeros(shape, dtype=tensor.dtype))
            else:
                host.append(accelerator.pinned(shape, tensor.dtype).zero_())
        self._where = torch.device("cpu") if accelerator is None else accelerator.device
        self._device = BlockPool(device, self._where)
        self._host = BlockPool(host, self._where)

    def swap_out(self, plan: plan_pb2.Plan) -> Copies:
        """Makes the plan's copies from the device.

        Raises:
            PlanError: the columns are malformed or name blocks that do not exist.
        """
        if not (plan.swap_out_blocks or plan.swap_out_host_blocks):
            return _NONE
        blocks, host_blocks = self._columns(plan.swap_out_blocks, plan.swap_out_host_blocks)
        copies, ended = self._copy(self._device, blocks, self._host, host_blocks, after_steps=True)
        if self._accelerator is not None and ended is not None and np.isin(blocks, _written_blocks(plan)).any():
            self._accelerator.wait(ended)
        return copies

    def swap_in(self, plan: plan_pb2.Plan) -> Copies:
        """Makes the plan's copies to the device.

        Raises:
            PlanError: the columns are malformed or name blocks that do not exist.
        """
        if not (plan.swap_in_blocks or plan.swap_in_host_blocks):
            return _NONE
        blocks, host_blocks = self._columns(plan.swap_in_blocks, plan.swap_in_host_blocks)
        copies, ended = self._copy(self._host, host_blocks, self._device, blocks, after_steps=False)
        if self._accelerator is not None and ended is not None:
            self._accelerator.wait(ended)
        return copies

    def _columns(self, device_column: bytes, host_column: bytes) -> tuple[Int32Array, Int32Array]:
        try:
            blocks, host_blocks = from_columns(device_column, host_column)
        except MalformedColumnError as error:
            raise PlanError(str(error)) from None
        for what, column, limit in (
            ("block", blocks, self._num_blocks),
            ("host block", host_blocks, self._num_host_blocks),
        ):
            if not 0 <= column.min() <= column.max() < limit:
                raise PlanError(f"swap: a {what} outside [0, {limit})")
        return blocks, host_blocks

    def _copy(
        self,
        source: BlockPool,
        source_blocks: Int32Array,
        target: BlockPool,
        target_blocks: Int32Array,
        *,
        after_steps: bool,
    ) -> tuple[Copies, Event | None]:
        """Makes copies; on an accelerator enqueues them, and gives the event behind them.

        `after_steps`: not before the steps launched so far have run. What a swap-in reads, the stream of copies itself
        has written, and what it writes no step uses any more.
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


def _written_blocks(plan: plan_pb2.Plan) -> Int32Array:
    """The blocks that what comes after a plan's swap-outs may write: those it gives to rows, and targets of copies."""
    columns = [plan.append_blocks, plan.copy_targets, plan.swap_in_blocks]
    columns += [column for admission in plan.admissions for column in admission.block_tables]
    try:
        return np.concatenate([from_column(column) for column in columns])
    except MalformedColumnError as error:
        raise PlanError(str(error)) from None


def copy_ids(plan: plan_pb2.Plan) -> Int32Array:
    """The ids of all copies in a plan.

    Raises:
        PlanError: the column is malformed.
    """
    try:
        return from_column(plan.copy_ids)
    except MalformedColumnError as error:
        raise PlanError(str(error)) from None
