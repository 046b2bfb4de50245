"""Quantised KV: less memory, the same tokens whatever the plans look like."""

from pathlib import Path

import pytest

from checks.driver import Driver, execute, make_engine
from kernels.native.serving import native
from measure.testbed.checkpoints import make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(("dtype", "element"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize(("kind", "size"), [("int8", 36), ("fp8", 36), ("int4", 20)])
def test_the_pool_holds_as_many_more_tokens_as_they_are_smaller(
    kind: str, size: int, dtype: str, element: int, checkpoint: Path
) -> None:
    """Heads of 32 elements take 32 bytes (16 in int4) and 4 bytes of scales, instead of 128 or 64 bytes."""
    wide, narrow = (
        make_engine(
            checkpoint, dtype=dtype, kv_cache_dtype=chosen, kv_cache_memory="1MiB", max_num_seqs=4096
        ).limits.num_blocks
        for chosen in ("auto", kind)
    )
    factor = 32 * element / size

    assert narrow in range(int(factor * wide), int(factor * (wide + 1)) + 1)


@pytest.mark.skipif(native() is None, reason="needs the native CPU kernels")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_blocks_are_shared_and_copied_whole(checkpoint: Path, kind: str) -> None:
    """A row that shares full blocks, and copies the last one, continues like the row that wrote them."""
    prompt = list(range(1, 21))
    expected = Driver(make_engine(checkpoint, kv_cache_dtype=kind, block_size=8)).generate(prompt, 4)
    engine = make_engine(checkpoint, kv_cache_dtype=kind, block_size=8, max_num_seqs=2)

    def admission(row: int, tokens: list[int], blocks: list[int], computed: int) -> plan_pb2.Admission:
        return plan_pb2.Admission(
            row=row, generation=row + 1, token_ids=to_column(tokens), block_tables=[to_column(blocks)],
            num_prompt_tokens=20, num_computed_tokens=computed,
        )  # fmt: skip

    results = [
        execute(engine, plan)
        for plan in (
            plan_pb2.Plan(
                step=1,
                admissions=[admission(0, prompt, [1, 2, 3], 0)],
                chunk_rows=to_column([0]),
                chunk_lengths=to_column([20]),
            ),
            plan_pb2.Plan(
                step=2,
                leaves=to_column([0]),
                copy_sources=to_column([3]),
                copy_targets=to_column([6]),
                admissions=[admission(1, [*prompt, expected[0]], [1, 2, 6], 20)],
                chunk_rows=to_column([1]),
                chunk_lengths=to_column([1]),
            ),
            plan_pb2.Plan(step=3),
            plan_pb2.Plan(step=4),
        )
    ]

    assert [from_column(result.tokens).tolist() for result in results] == [[token] for token in expected]


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_tokens_do_not_depend_on_chunks(checkpoint: Path, kind: str) -> None:
    """A prompt computed at once or in pieces gives the same tokens, because later tokens always see the rounded KV."""
    prompt = list(range(1, 60))
    answers = []
    for pieces in ([59], [20, 1, 38]):
        driver = Driver(make_engine(checkpoint, kv_cache_dtype=kind))
        row = driver.admit(prompt)
        for piece in pieces:
            driver.chunk(row, piece)
            driver.step()
        while len(driver.rows[row].tokens) < len(prompt) + 12:
            driver.step()
        answers.append(driver.leave(row))

    assert answers[0] == answers[1]
