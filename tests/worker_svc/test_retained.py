"""KV that stays in a worker's blocks when its session is lost: what the next Hello reports, and that it is right."""

from pathlib import Path

import numpy as np
import pytest

from checks.driver import Driver, execute, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column
from tests.worker_svc.fake_accelerator import FakeAccelerator
from worker_svc.link.encoding import encode_hello
from worker_svc.link.identity import Identity
from worker_svc.link.session import HelloReason
from worker_svc.rows.retained import KnownTokens

ROOT = bytes(range(32))
PROMPT = [(7 * index + 3) % VOCAB_SIZE for index in range(20)]


def _admission(tokens: list[int], blocks: list[int], computed: int, root: bytes = ROOT) -> plan_pb2.Admission:
    return plan_pb2.Admission(
        row=0, generation=1, token_ids=to_column(tokens), block_tables=[to_column(blocks)], num_prompt_tokens=20,
        num_computed_tokens=computed, prefix_root=root,
    )  # fmt: skip


def _chunk(step: int, admissions: list[plan_pb2.Admission], length: int) -> plan_pb2.Plan:
    return plan_pb2.Plan(step=step, admissions=admissions, chunk_rows=to_column([0]), chunk_lengths=to_column([length]))


@pytest.mark.parametrize("accelerator", [None, FakeAccelerator()], ids=["cpu", "accelerator"])
def test_a_sequence_continues_with_the_kv_of_the_lost_session(
    tmp_path: Path, accelerator: FakeAccelerator | None
) -> None:
    """After a reset, a row that gets the reported blocks samples the same tokens, and computes only one."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    expected = Driver(make_engine(folder, block_size=8)).generate(PROMPT, 6)
    engine = make_engine(folder, accelerator=accelerator, block_size=8)
    execute(engine, _chunk(1, [_admission(PROMPT, [5, 6, 7], 0)], 20))
    for step in (2, 3):
        execute(engine, plan_pb2.Plan(step=step))
    (retained,) = engine.retained()
    engine.reset()

    assert retained.token_ids.tolist() == [*PROMPT, *expected[:2]]
    assert (retained.prefix_root, retained.blocks.tolist(), retained.is_proven) == (ROOT, [5, 6, 7], True)
    tokens = [*PROMPT, *expected[:3]]
    result = execute(engine, _chunk(1, [_admission(tokens, [5, 6, 7], 22)], 1))
    assert from_column(result.tokens).tolist() == expected[3:4]
    assert engine.retained()


def test_a_row_in_prefill_is_reported_with_what_is_computed(tmp_path: Path) -> None:
    """Such KV is not proven, because no token was sampled from it."""
    engine = make_engine(make_checkpoint("LlamaForCausalLM", tmp_path), block_size=8)
    execute(engine, _chunk(1, [_admission(PROMPT, [5, 6, 7], 0)], 12))
    (retained,) = engine.retained()
    assert (retained.token_ids.tolist(), retained.blocks.tolist()) == (PROMPT[:12], [5, 6])
    assert not retained.is_proven
    hello = encode_hello(
        Identity(worker_id="w", limits=engine.limits, model="m"), 1, HelloReason.SESSION_LOST, [retained]
    )
    assert from_column(hello.retained[0].token_ids).tolist() == PROMPT[:12]


def test_a_row_that_must_not_be_shared_is_not_reported(tmp_path: Path) -> None:
    """Without a root, the scheduler cannot find the sequence."""
    engine = make_engine(make_checkpoint("LlamaForCausalLM", tmp_path), block_size=8)
    execute(engine, _chunk(1, [_admission(PROMPT, [5, 6, 7], 0, root=b"")], 12))
    assert engine.retained() == ()


def test_tokens_of_an_earlier_use_of_a_row_are_dropped() -> None:
    """A result that arrives after its row was admitted again belongs to the earlier request."""
    known = KnownTokens()

    def column(*values: int) -> "np.typing.NDArray[np.int32]":
        return np.array(values, np.int32)

    known.admit(3, 1, column(1, 2))
    known.admit(4, 1, column(9))
    known.sampled(np.array([4, 3, 3]), np.array([1, 1, 1]), column(20, 10, 11))
    assert known.tokens(3).tolist() == [1, 2, 10, 11]
    known.leave(3)
    known.admit(3, 2, column(5))
    known.sampled(np.array([3, 4, 3]), np.array([1, 1, 2]), column(12, 21, 6))
    assert known.tokens(3).tolist() == [5, 6]
    assert known.tokens(4).tolist() == [9, 20, 21]
