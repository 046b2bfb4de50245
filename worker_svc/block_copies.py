"""Copies of blocks on the device, by which rows share the beginning of a block that they go on differently from.

A plan names them block by block; all of them are made before anything of the plan is written. On CUDA they are enqueued
on the stream of the forward passes, so the steps before have written what is copied and the plan's own step reads the
copies, without the host waiting.
"""

from collections.abc import Sequence

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from shared.columns import MalformedColumnError, from_columns
from worker_svc.device import upload
from worker_svc.errors import PlanError
from worker_svc.model.base import KVCache


def copy_blocks(plan: plan_pb2.Plan, caches: Sequence[KVCache]) -> None:
    """Makes the plan's copies in the keys and values of every layer, whole blocks, by one gather and scatter each.

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
    tensors = [tensor for pair in caches for tensor in pair]
    num_blocks = len(tensors[0]) if tensors else 0
    if min(sources.min(), targets.min()) < 0 or max(sources.max(), targets.max()) >= num_blocks:
        raise PlanError(f"copy: a block outside [0, {num_blocks})")
    if len(np.unique(targets)) < len(targets) or np.isin(targets, sources).any():
        raise PlanError("copy: a target that is another copy's target or source")
    from_blocks, to_blocks = upload(np.stack(columns).astype(np.int64), tensors[0].device)
    for tensor in tensors:
        tensor.index_copy_(0, to_blocks, tensor.index_select(0, from_blocks))
