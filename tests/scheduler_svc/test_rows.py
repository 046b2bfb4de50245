"""The table of running rows keeps every token, for any number of rows and any length."""

import random

import numpy as np
import pytest

from scheduler_svc.core.workers.rows import RowTable
from tests.scheduler_svc.requests import make_request

PROMPT = 5


@pytest.mark.parametrize(("max_rows", "steps"), [(1, 4000), (7, 3000), (1100, 1200)])
def test_a_rows_tokens_are_all_there_when_its_request_leaves(max_rows: int, steps: int) -> None:
    """Whenever a request leaves its row, its log ends with exactly the row's tokens, in order.

    Rows miss steps and are reused.
    """
    chance = random.Random(max_rows)
    rows = RowTable(max_rows, 4, 2000)
    generated: dict[int, list[int]] = {}

    def occupy() -> None:
        request = make_request(prompt=PROMPT, limit=1 << 20)
        row = rows.occupy(
            request, limit=request.limit, frontend_index=0, blocks=np.arange(2), num_computed=0, num_shared=0, rank=0.0
        )
        generated[row] = []

    def vacate(row: int) -> None:
        request, _ = rows.vacate(row)
        assert request.tokens.tolist()[PROMPT:] == generated.pop(row)

    for _ in range(max_rows):
        occupy()
    for step in range(steps):
        if chance.random() < 0.01:
            vacate(chance.choice(sorted(generated)))
            occupy()
        held_out = chance.randrange(max_rows) if max_rows > 1 and chance.random() < 0.5 else -1
        taking_part = [row for row in range(max_rows) if row != held_out]
        tokens = np.array(taking_part, np.int32) + 10_000 * (step % 1000)
        first_indices = rows.commit(np.array(taking_part, np.intp), tokens)
        assert first_indices.tolist() == [len(generated[row]) for row in taking_part]
        for row, token in zip(taking_part, tokens.tolist(), strict=True):
            generated[row].append(token)
    for row in list(generated):
        vacate(row)
