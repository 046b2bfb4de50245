"""Rows of one step that share blocks, for classes of `transformers` with their own attention."""

from itertools import permutations

import numpy as np
import pytest
import torch

from checks.driver import CPU
from measure.testbed.checkpoints import make_checkpoint
from shared.config import WorkerConfig
from worker_svc.model.base import AttentionInputs, Model
from worker_svc.model.loader import load_model

BLOCK_SIZE = 4
TOKENS = torch.arange(1, 18)
ROWS = ((0, 8), (8, 16), (16, 17))
"""First and last position (exclusive) that each row computes. Its earlier tokens are in blocks of the rows before."""


@pytest.fixture(scope="module", params=["DeepseekV3ForCausalLM", "FalconForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model with latent attention, and one of an old class."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    found, _ = load_model(WorkerConfig(model=str(folder), device="cpu", dtype="float32"), CPU)
    return found


def _logits(
    model: Model, rows: tuple[tuple[int, int], ...], caches: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Compute rows in one step; return the logits of each row's last token."""
    lengths = [end - first for first, end in rows]
    tokens = torch.cat([torch.arange(first, end) for first, end in rows])
    attention = AttentionInputs(
        slot_mapping=tokens,
        block_tables=torch.arange(5, dtype=torch.int32).expand(len(rows), 5).contiguous(),
        query_start=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        context_lens=torch.tensor([end for _, end in rows], dtype=torch.int32),
        max_query_len=max(lengths),
        rows=np.arange(len(rows)),
    )
    with torch.inference_mode():
        return model.forward(TOKENS[tokens], tokens, attention, caches, torch.tensor(np.cumsum(lengths) - 1))


def _caches(model: Model) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (
            torch.full((5, shape.num_kv_heads, BLOCK_SIZE, keys), 9.0),
            torch.full((5, shape.num_kv_heads, BLOCK_SIZE, values), 9.0),
        )
        for shape in model.kv_shapes
        for keys, values in (shape.widths,)
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_a_row_may_share_blocks_that_others_fill_in_the_same_step(model: Model, order: tuple[int, ...]) -> None:
    """In whatever order the rows are, each has the logits that it has after the others were computed."""
    caches = _caches(model)
    one_by_one = torch.cat([_logits(model, (row,), caches) for row in ROWS])

    together = _logits(model, tuple(ROWS[place] for place in order), _caches(model))

    assert torch.allclose(together, one_by_one[list(order)], atol=1e-5)
