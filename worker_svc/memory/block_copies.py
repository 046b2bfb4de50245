"""Copies of blocks on the device (copy-on-write), for rows that share only the first tokens of a block.

A plan lists the copies block by block. All copies are made before the plan writes any block. On CUDA they are enqueued
on the stream of the forward passes. They therefore run after the steps before and before the plan's own step, and the
host does not wait.
"""

import numpy as np

from kernels.block_copy import BlockPool, copy_blocks
from protos.quire.plan.v1 import plan_pb2
from shared.columns import MalformedColumnError, from_columns
from worker_svc.device.upload import upload
from worker_svc.interface.errors import PlanError


def make_copies(plan: plan_pb2.Plan, pool: BlockPool) -> None:
    """Copy whole blocks, as listed in the plan, in the keys and values of every layer; one kernel on a GPU.

    Raises:
        PlanError: a column is malformed, a block ID is invalid, or a target is also the target or source of another
            copy.
    """
    if not (plan.copy_sources or plan.copy_targets):
        return
    try:
        columns = from_columns(plan.copy_sources, plan.copy_targets)
    except MalformedColumnError as error:
        raise PlanError(str(error)) from None
    sources, targets = columns
    tensors = pool.tensors
    num_blocks = len(tensors[0]) if tensors else 0
    if min(sources.min(), targets.min()) < 0 or max(sources.max(), targets.max()) >= num_blocks:
        raise PlanError(f"copy: a block ID is outside [0, {num_blocks})")
    if len(np.unique(targets)) < len(targets) or np.isin(targets, sources).any():
        raise PlanError("copy: a target block is also the target or source of another copy")
    copy_blocks(pool, pool, upload(np.stack(columns).astype(np.int64), tensors[0].device))
