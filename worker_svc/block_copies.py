"""Copies of blocks on the device, by which rows share the beginning of a block that they go on differently from.

A plan names them block by block; all of them are made before anything of the plan is written. On CUDA they are enqueued
on the stream of the forward passes, so the steps before have written what is copied and the plan's own step reads the
copies, without the host waiting.
"""

import numpy as np

from kernels.block_copy import BlockPool, copy_blocks
from protos.quire.plan.v1 import plan_pb2
from shared.columns import MalformedColumnError, from_columns
from worker_svc.device import upload
from worker_svc.errors import PlanError


def make_copies(plan: plan_pb2.Plan, pool: BlockPool) -> None:
    """Makes the plan's copies in the keys and values of every layer, whole blocks, by one kernel on a GPU.

    Raises:
        PlanError: the columns are malformed, name blocks that do not exist, or a block is copied to that is copied to
            or from elsewhere.
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
        raise PlanError(f"copy: a block outside [0, {num_blocks})")
    if len(np.unique(targets)) < len(targets) or np.isin(targets, sources).any():
        raise PlanError("copy: a target that is another copy's target or source")
    copy_blocks(pool, pool, upload(np.stack(columns).astype(np.int64), tensors[0].device))
