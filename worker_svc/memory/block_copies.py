"""Copies blocks on the device (copy-on-write), for rows that share only a block's first tokens.

A plan lists the copies block by block. All copies are made before the plan writes any block. On CUDA, they are enqueued
on the stream of the forward passes. They therefore run after the previous steps and before the plan's step, without
waiting on the host.
"""

import numpy as np

from kernels.block_copy import BlockPool, copy_blocks
from worker_svc.device.upload import upload
from worker_svc.interface.plan import BlockCopies


def make_copies(copies: BlockCopies, pool: BlockPool) -> None:
    """Copy whole blocks in every layer's keys and values; one kernel on a GPU."""
    columns = np.stack((copies.sources, copies.targets)).astype(np.int64)
    copy_blocks(pool, pool, upload(columns, pool.tensors[0].device))
