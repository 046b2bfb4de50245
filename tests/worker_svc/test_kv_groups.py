"""KV groups: which layers share blocks, and a row's tables for windows."""

from typing import Any

import numpy as np
import pytest
import torch

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from worker_svc.interface.errors import PlanError
from worker_svc.interface.limits import Limits
from worker_svc.link.decoding import decode_plan
from worker_svc.memory.kv_groups import WINDOW_CHUNK, divide
from worker_svc.model.base import KVShape
from worker_svc.rows.table import RowTable

SHAPE = KVShape(2, 64)
LIMITS = Limits(
    max_rows=2, max_tokens_per_step=64, max_model_len=80, block_size=4, num_blocks=50, vocab_size=100,
    num_kv_groups=3, window=6, window_chunk=8,
)  # fmt: skip


def test_layers_are_divided_by_their_windows() -> None:
    """Layers without a window form the first group, and the others groups of at most as many layers."""
    groups = divide([SHAPE] * 8, [5, 5, None, 5, 5, None, 3, 5], max_model_len=1000, chunk=10)

    assert groups is not None
    assert groups.groups == (1, 1, 0, 2, 2, 0, 3, 3)
    assert groups.places == (0, 1, 0, 0, 1, 1, 0, 1)
    assert (groups.num_groups, groups.num_places, groups.window) == (4, 2, 5)


@pytest.mark.parametrize(
    ("windows", "max_model_len"),
    [
        ([], 1000),
        ([None] * 8, 1000),
        ([5] * 8, 1000),
        ([5, None] * 4, 15),
        ([5, None, None, None] * 2, 1000),  # Three quarters of a block would be empty in the second group.
    ],
)
def test_other_models_have_one_group(windows: list[int | None], max_model_len: int) -> None:
    """Without both kinds of layers, with short sequences only, or with much unused memory, blocks hold all layers."""
    assert divide([SHAPE] * 8, windows, max_model_len=max_model_len, chunk=10) is None


def test_layers_of_different_sizes_have_one_group() -> None:
    """Blocks of all groups must have one size."""
    assert divide([SHAPE, KVShape(1, 64)], [5, None], max_model_len=1000, chunk=10) is None


@pytest.mark.parametrize(("num_whole", "max_rows", "pays"), [(240, 64, False), (240, 2, True), (6_000, 64, True)])
def test_short_requests_do_not_fit_worse(num_whole: int, max_rows: int, pays: bool) -> None:
    """Groups are used only if the windows of all rows fit, and as many tokens as without groups (Gemma-3 4B)."""
    windows = ([1024] * 5 + [None]) * 5 + [1024] * 4
    groups = divide([SHAPE] * len(windows), windows, max_model_len=32_768, chunk=WINDOW_CHUNK)
    assert groups is not None
    num_blocks = num_whole * len(windows) // groups.num_places

    assert groups.pay(num_blocks, num_whole, max_rows=max_rows, block_size=16) == pays


def _admission(**changes: object) -> plan_pb2.Admission:
    tables = [to_column(range(10)), to_column([20, 21, 22, 23, 24, 25]), to_column([30, 31, 32, 33, 34, 35])]
    fields: dict[str, Any] = {"window_first": 2, "window_period": 5, "block_tables": tables, "num_computed_tokens": 16}
    return plan_pb2.Admission(
        row=1, generation=1, token_ids=to_column([1] * 40), num_prompt_tokens=40, **fields | changes
    )


def test_tables_for_windows_repeat() -> None:
    """After its end, a table repeats with its period, up to the longest sequence."""
    rows = RowTable(LIMITS, torch.device("cpu"))
    plan = decode_plan(plan_pb2.Plan(step=1, admissions=[_admission()]), LIMITS)
    rows.change(plan)

    positions = np.arange(2, LIMITS.max_blocks_per_row)
    assert rows.tables[0].blocks(1).tolist() == list(range(10))
    for group, first in ((1, 20), (2, 30)):
        blocks = rows.tables[group].blocks_at(np.full(len(positions), 1), positions).tolist()
        assert blocks[:6] == list(range(first, first + 6))
        assert blocks[6:] == [first + 1 + number % 5 for number in range(len(positions) - 6)]
    rows.check_chunks(np.array([1]), np.array([8]))
    with pytest.raises(PlanError, match="exceeds 8 tokens"):
        rows.check_chunks(np.array([1]), np.array([9]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_first": 3}, "begin behind the window"),
        ({"block_tables": [to_column(range(10)), b"", b""]}, "are empty"),
        ({"block_tables": [to_column(range(10)), to_column([20]), to_column([30, 31])]}, "differ in length"),
        ({"block_tables": [to_column(range(10)), to_column([20])]}, "2 block tables do not match 3 KV groups"),
        ({"block_tables": [to_column(range(10)), to_column([50]), to_column([30])]}, "a block ID is outside"),
        ({"window_period": 3}, "does not hold 13 tokens"),
        ({"window_period": 1 << 31}, "does not hold 13 tokens"),
    ],
)
def test_invalid_tables_are_refused(changes: dict[str, object], message: str) -> None:
    """Tables that would let a step read or write other blocks than the row's violate the protocol."""
    with pytest.raises(PlanError, match=message):
        decode_plan(plan_pb2.Plan(step=1, admissions=[_admission(**changes)]), LIMITS)
