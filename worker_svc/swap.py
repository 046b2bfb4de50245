"""Host memory for the KV of paused requests, and the copies between it and the device.

A plan names the copies block by block; swap-outs are made before anything else of the plan touches the device blocks,
swap-ins before its forward pass. On CUDA the copies are enqueued on the stream of the forward passes, so both orders
hold without the host waiting, and a plan's copies are done when its step is.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from protos.quire.plan.v1 import plan_pb2
from shared.columns import Int32Array, MalformedColumnError, from_column, from_columns
from worker_svc.errors import PlanError
from worker_svc.model.base import KVCache


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of one plan."""

    num_blocks: int
    elapsed_ns: Callable[[], int]
    """How long they took; to be asked once the plan's step is done."""


_NO_COPIES = Copies(0, lambda: 0)


class HostPool:
    """The host's blocks, laid out like the device's: `[num_host_blocks, num_kv_heads, block_size, head_dim]` per layer,
    keys and values apart."""

    def __init__(self, caches: Sequence[KVCache], num_host_blocks: int) -> None:
        """`caches` are the device's; the host's memory is allocated here, pinned if the device is a GPU."""
        self._num_host_blocks = num_host_blocks
        self._device = [tensor for pair in caches for tensor in pair]
        pinned = bool(self._device) and self._device[0].is_cuda
        self._host = [
            torch.zeros((num_host_blocks, *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pinned)
            for tensor in self._device
        ]

    def swap_out(self, plan: plan_pb2.Plan) -> Copies:
        """Makes the plan's copies from the device.

        Raises:
            PlanError: the columns are malformed or name blocks that do not exist.
        """
        blocks, host_blocks = self._columns(plan.swap_out_blocks, plan.swap_out_host_blocks)
        return self._copy(self._device, blocks, self._host, host_blocks)

    def swap_in(self, plan: plan_pb2.Plan) -> Copies:
        """Makes the plan's copies to the device.

        Raises:
            PlanError: the columns are malformed or name blocks that do not exist.
        """
        blocks, host_blocks = self._columns(plan.swap_in_blocks, plan.swap_in_host_blocks)
        return self._copy(self._host, host_blocks, self._device, blocks)

    def _columns(self, device_column: bytes, host_column: bytes) -> tuple[Int32Array, Int32Array]:
        try:
            blocks, host_blocks = from_columns(device_column, host_column)
        except MalformedColumnError as error:
            raise PlanError(str(error)) from None
        num_blocks = len(self._device[0]) if self._device else 0
        for what, column, limit in (("block", blocks, num_blocks), ("host block", host_blocks, self._num_host_blocks)):
            if len(column) and not 0 <= column.min() <= column.max() < limit:
                raise PlanError(f"swap: a {what} outside [0, {limit})")
        return blocks, host_blocks

    def _copy(
        self,
        sources: Sequence[torch.Tensor],
        source_blocks: Int32Array,
        targets: Sequence[torch.Tensor],
        target_blocks: Int32Array,
    ) -> Copies:
        if not len(source_blocks):
            return _NO_COPIES
        if not self._device[0].is_cuda:
            began = time.perf_counter_ns()
            from_index, to_index = (
                torch.from_numpy(column.astype(np.int64)) for column in (source_blocks, target_blocks)
            )
            for source, target in zip(sources, targets, strict=True):
                target.index_copy_(0, to_index, source.index_select(0, from_index))
            elapsed = time.perf_counter_ns() - began
            return Copies(len(source_blocks), lambda: elapsed)
        began_event, ended_event = _event(), _event()
        began_event.record()
        for source, target in zip(sources, targets, strict=True):
            for old, new in zip(source_blocks.tolist(), target_blocks.tolist(), strict=True):
                target[new].copy_(source[old], non_blocking=True)
        ended_event.record()
        return Copies(len(source_blocks), lambda: int(began_event.elapsed_time(ended_event) * 1e6))


def copy_ids(plan: plan_pb2.Plan) -> Int32Array:
    """The ids of all copies in a plan.

    Raises:
        PlanError: the column is malformed.
    """
    try:
        return from_column(plan.copy_ids)
    except MalformedColumnError as error:
        raise PlanError(str(error)) from None


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
