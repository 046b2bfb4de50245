"""Copies on the device: rows diverge in the middle of a block and get the same tokens as alone."""

from pathlib import Path

import pytest

from checks.driver import Driver, execute, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from worker_svc.execution.engine import Engine

FIRST = [(7 * index + 3) % VOCAB_SIZE for index in range(20)]
OTHER = [(5 * index + 11) % VOCAB_SIZE for index in range(20)]
BRANCHES = [[*FIRST[:11], *OTHER[:9]], [*FIRST[:13], 1, 2, 3]]
"""They agree with `FIRST` up to the middle of its second block."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine for all tests of this file."""
    folder: Path = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
    return make_engine(folder, block_size=8, max_num_seqs=4)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[list[int]]:
    """What each branch, `FIRST` and `OTHER` go on with when nothing is copied."""
    engine.reset()
    driver = Driver(engine)
    return [driver.generate(prompt, 3) for prompt in (*BRANCHES, FIRST, OTHER)]


def _admission(row: int, generation: int, tokens: list[int], blocks: list[int], computed: int) -> plan_pb2.Admission:
    return plan_pb2.Admission(
        row=row,
        generation=generation,
        token_ids=to_column(tokens),
        block_tables=[to_column(blocks)],
        num_prompt_tokens=len(tokens),
        num_computed_tokens=computed,
    )


def _first(engine: Engine) -> None:
    """Step 1: row 0 computes `FIRST` into blocks 1, 2 and 3."""
    engine.reset()
    execute(
        engine,
        plan_pb2.Plan(
            step=1,
            admissions=[_admission(0, 1, FIRST, [1, 2, 3], 0)],
            chunk_rows=to_column([0]),
            chunk_lengths=to_column([20]),
        ),
    )


def test_rows_go_on_from_the_middle_of_a_copied_block(engine: Engine, expected: list[list[int]]) -> None:
    """Two rows that copy the same block of a third row compute only their different tokens, and all tokens are right.

    The third row continues to write its blocks in the meantime.
    """
    _first(engine)

    results = [
        execute(
            engine,
            plan_pb2.Plan(
                step=2,
                copy_sources=to_column([2, 2]),
                copy_targets=to_column([9, 5]),
                admissions=[
                    _admission(1, 1, BRANCHES[0], [1, 9, 8], 11),
                    _admission(2, 1, BRANCHES[1], [1, 5], 13),
                ],
                chunk_rows=to_column([1, 2]),
                chunk_lengths=to_column([9, 3]),
            ),
        ),
        execute(engine, plan_pb2.Plan(step=3, append_rows=to_column([2]), append_blocks=to_column([6]))),
        execute(engine, plan_pb2.Plan(step=4)),
    ]

    assert results[0].timings.num_tokens == 1 + 9 + 3
    tokens = [from_column(result.tokens).tolist() for result in results]
    assert [row[1] for row in tokens] == expected[0]
    assert [row[2] for row in tokens] == expected[1]
    assert [row[0] for row in tokens][:2] == expected[2][1:]


def test_a_copy_is_made_before_its_step_writes(engine: Engine, expected: list[list[int]]) -> None:
    """A copy has the content of earlier steps, although the same plan gives the source block to another row."""
    _first(engine)

    result = execute(
        engine,
        plan_pb2.Plan(
            step=2,
            leaves=to_column([0]),
            copy_sources=to_column([1, 2]),
            copy_targets=to_column([7, 9]),
            admissions=[_admission(0, 2, OTHER, [1, 2, 3], 0), _admission(1, 1, BRANCHES[0], [7, 9, 8], 11)],
            chunk_rows=to_column([0, 1]),
            chunk_lengths=to_column([20, 9]),
        ),
    )

    assert from_column(result.tokens).tolist() == [expected[3][0], expected[0][0]]
