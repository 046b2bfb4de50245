"""`make kernels-all`: the attention kernels, interpreted, at every type, head dimension and page size.

This takes too long for `make test`, which runs a sample in `test_paged_attention`. The file's name keeps pytest from
collecting it unless it is named. bfloat16 is missing, because the interpreter computes with numpy, which treats its
bits as integers. `measure.kernels.aot --all` compiles bfloat16.
"""

from __future__ import annotations

import pytest
import torch

from measure.kernels.aot import BLOCK_SIZES, HEAD_DIMS
from tests.kernels.batches import paged_batch
from tests.kernels.interpreted.test_paged_attention import assert_equals_reference

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
BATCHES = {
    "decode": [(1, 1), (63, 1), (64, 1), (300, 1)],
    "mixed": [(70, 33), (40, 1), (9, 9), (130, 65), (2, 1)],
}


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block_size", [*BLOCK_SIZES, 24, 64])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (None, 30.0)])
def test_attention_equals_the_reference(
    rows: list[tuple[int, int]],
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    window: int | None,
    cap: float | None,
) -> None:
    """Every combination gives the float64 reference's result within the rounding of its type."""
    batch = paged_batch(rows, dtype=dtype, head_dim=head_dim, block_size=block_size)

    assert_equals_reference(batch, window, cap, TOLERANCES[dtype])


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 32])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_groups_of_every_size(group_size: int, head_dim: int) -> None:
    """Any number of query heads may share a KV head, at any head dimension."""
    assert_equals_reference(
        paged_batch([(50, 1), (40, 17)], num_heads=2 * group_size, num_kv_heads=2, head_dim=head_dim)
    )
