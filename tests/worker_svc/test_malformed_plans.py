"""Plans that break the contract: refused by name, and the engine serves on after a reset."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checks.driver import Driver, execute, make_engine
from measure.testbed.checkpoints import make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from tests.examples import examples
from worker_svc.execution.engine import Engine
from worker_svc.interface.errors import PlanError

MAX_ROWS = 4
BLOCK_SIZE = 8
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]

Break = Callable[[plan_pb2.Plan], object]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine for all tests of this file."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
    return make_engine(
        folder,
        max_num_seqs=MAX_ROWS,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=32,
        max_model_len=64,
        speculation="ngram",
        speculative_tokens=3,
    )


@pytest.fixture(scope="module")
def answer(engine: Engine) -> list[int]:
    """What an undisturbed engine says."""
    engine.reset()
    return Driver(engine).generate(PROMPT, 6)


def good_plan() -> plan_pb2.Plan:
    """Row 0 decodes with 9 tokens in 2 blocks, row 2 is in prefill (see `prepare`); this plan continues both."""
    return plan_pb2.Plan(
        step=2,
        leaves=b"",
        admissions=[
            plan_pb2.Admission(
                row=1,
                generation=1,
                token_ids=to_column(PROMPT),
                num_prompt_tokens=len(PROMPT),
                block_tables=[to_column([8, 5])],
                request_id="request",
            )
        ],
        append_rows=to_column([2]),
        append_blocks=to_column([6]),
        chunk_rows=to_column([1, 2]),
        chunk_lengths=to_column([9, 3]),
    )


def prepare(engine: Engine) -> None:
    """Brings the engine into the state that `good_plan` continues."""
    engine.reset()
    admissions = [
        plan_pb2.Admission(
            row=row,
            generation=1,
            token_ids=to_column(PROMPT),
            num_prompt_tokens=len(PROMPT),
            block_tables=[to_column(blocks)],
        )
        for row, blocks in ((0, [3, 0]), (2, [7]))
    ]
    plan = plan_pb2.Plan(step=1, admissions=admissions, chunk_rows=to_column([0]), chunk_lengths=to_column([9]))
    execute(engine, plan)


def set_admission(**fields: Any) -> Break:
    """Changes the plan's admission."""

    def change(plan: plan_pb2.Plan) -> None:
        for name, value in fields.items():
            if name == "block_tables":
                plan.admissions[0].block_tables[:] = value
            else:
                setattr(plan.admissions[0], name, value)

    return change


def set_columns(**columns: list[int] | bytes) -> Break:
    """Changes columns of the plan."""

    def change(plan: plan_pb2.Plan) -> None:
        for name, values in columns.items():
            setattr(plan, name, values if isinstance(values, bytes) else to_column(values))

    return change


def test_the_plan_that_the_others_change_is_valid(engine: Engine) -> None:
    """The plan from which the malformed plans are made is executed."""
    prepare(engine)

    result = execute(engine, good_plan())

    assert result.rows == to_column([0, 1])


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (set_columns(leaves=[3]), "leave: a row is not in use"),
        (set_columns(draft_rows=[3], draft_limits=[1]), "draft limit: a row is not in use"),
        (set_columns(draft_rows=[0], draft_limits=[4]), "draft limit: a limit is outside \\[0, 3\\]"),
        (set_columns(draft_rows=[0], draft_limits=[-1]), "draft limit: a limit is outside"),
        (set_columns(draft_rows=[4], draft_limits=[1]), "draft limit: a row is outside"),
        (set_columns(draft_rows=[0, 0], draft_limits=[1, 1]), "draft limit: a row appears twice"),
        (set_columns(draft_rows=[0]), "lengths differ"),
        (set_columns(leaves=[-1]), "leave: a row is outside"),
        (set_columns(leaves=[0, 0]), "leave: a row appears twice"),
        (set_columns(leaves=b"abc"), "not a multiple of 4"),
        (set_admission(row=0), "occupied"),
        (set_admission(row=MAX_ROWS), "outside"),
        (set_admission(row=2**32 - 1), "outside"),
        (set_admission(generation=0), "not newer"),
        (set_admission(token_ids=b""), "number of tokens, 0,"),
        (set_admission(token_ids=to_column([0] * 65)), "number of tokens, 65,"),
        (set_admission(token_ids=to_column([384])), "vocabulary"),
        (set_admission(token_ids=to_column([-1])), "vocabulary"),
        (set_admission(num_prompt_tokens=10), "the prompt is longer"),
        (set_admission(num_computed_tokens=9), "all tokens are computed already"),
        (set_admission(num_computed_tokens=1, block_tables=[b""]), "too few blocks"),
        (set_admission(block_tables=[]), "0 block tables"),
        (set_admission(block_tables=[to_column([1])] * 2), "2 block tables"),
        (set_admission(block_tables=[to_column([36])]), "a block ID is outside"),
        (set_admission(block_tables=[to_column(range(10))]), "exceeds 9 blocks"),
        (set_columns(append_rows=[3]), "append: a row is not in use"),
        (set_columns(append_blocks=[-1]), "a block ID is outside"),
        (set_columns(append_blocks=[1, 2]), "lengths differ"),
        (set_columns(append_rows=[2] * 9, append_blocks=[1] * 9), "exceeds 9 blocks"),
        (set_columns(chunk_rows=[1, 0]), "not in prefill"),
        (set_columns(chunk_rows=[1, 1]), "appears twice"),
        (set_columns(chunk_lengths=[10, 3]), "exceeds the remaining tokens"),
        (set_columns(chunk_lengths=[9, 0]), "length is 0"),
        (set_columns(chunk_lengths=[9]), "lengths differ"),
        (set_columns(append_rows=[], append_blocks=[], chunk_lengths=[9, 9]), "has no block"),
        (set_columns(swap_out_blocks=[1], swap_out_host_blocks=[0]), "host block ID is outside"),
        (set_columns(swap_in_blocks=[-1], swap_in_host_blocks=[0]), "block ID is outside"),
        (set_columns(swap_out_blocks=[1]), "lengths differ"),
        (set_columns(copy_ids=b"abc"), "not a multiple of 4"),
        (set_columns(copy_sources=b"abc"), "not a multiple of 4"),
        (set_columns(copy_sources=[1]), "lengths differ"),
        (set_columns(copy_sources=[3], copy_targets=[36]), "copy: a block ID is outside"),
        (set_columns(copy_sources=[-1], copy_targets=[4]), "copy: a block ID is outside"),
        (set_columns(copy_sources=[3, 0], copy_targets=[4, 4]), "copy: a target block is also"),
        (set_columns(copy_sources=[3, 4], copy_targets=[4, 1]), "copy: a target block is also"),
        (set_columns(holds=[2]), "not in decode"),
        (set_columns(holds=[3]), "not in use"),
        (set_columns(releases=[0]), "already released"),
        (set_admission(token_ids=to_column([1] * 40), block_tables=[to_column(range(5))]), ""),
    ],
)
def test_a_broken_contract_is_refused_by_name(engine: Engine, answer: list[int], broken: Break, reason: str) -> None:
    """The plan is refused with its fault, and after a reset the engine responds as if it had never seen the plan."""
    prepare(engine)
    plan = good_plan()
    broken(plan)
    if reason == "":
        plan.chunk_lengths, reason = to_column([31, 3]), "step: 35 tokens exceed max_tokens_per_step 32"

    with pytest.raises(PlanError, match=reason) as raised:
        execute(engine, plan)

    assert "\n" not in str(raised.value)
    engine.reset()
    assert Driver(engine).generate(PROMPT, 6) == answer


INVALID_SAMPLING = {
    "bytes": b"\xff" * 9,
    "truncated": plan_pb2.SamplingParams(temperature=1).SerializeToString()[:-1],
    "temperature": plan_pb2.SamplingParams(temperature=-1).SerializeToString(),
    "nan": plan_pb2.SamplingParams(temperature=float("nan")).SerializeToString(),
    "top_p": plan_pb2.SamplingParams(top_p=1.5).SerializeToString(),
    "min_p": plan_pb2.SamplingParams(min_p=float("nan")).SerializeToString(),
    "top_k": plan_pb2.SamplingParams(top_k=1 << 31).SerializeToString(),
    "logprobs": plan_pb2.SamplingParams(logprobs=1000).SerializeToString(),
    "column": plan_pb2.SamplingParams(banned_token_ids=b"abc").SerializeToString(),
    "stops": plan_pb2.SamplingParams(stop_token_ids=b"abc").SerializeToString(),
    "vocabulary": plan_pb2.SamplingParams(banned_token_ids=to_column([384])).SerializeToString(),
    "penalty": plan_pb2.SamplingParams(repetition_penalty=-1).SerializeToString(),
    "bad word": plan_pb2.SamplingParams(bad_words=[to_column([1])]).SerializeToString(),
}


@pytest.mark.parametrize("name", INVALID_SAMPLING)
def test_invalid_sampling_parameters_fail_their_row_alone(engine: Engine, answer: list[int], name: str) -> None:
    """The scheduler does not read them, so the worker ends the row and blames the request; other rows continue."""
    prepare(engine)
    plan = good_plan()
    set_admission(sampling=INVALID_SAMPLING[name])(plan)

    result = execute(engine, plan)

    assert result.rows == to_column([0])
    (failure,) = result.failures
    assert (failure.row, failure.kind) == (1, plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED)
    assert failure.field == "sampling"
    engine.reset()
    assert Driver(engine).generate(PROMPT, 6) == answer


def test_a_row_cannot_outgrow_the_model(engine: Engine) -> None:
    """A decode row at the maximum length must leave; another step for it is refused."""
    engine.reset()
    driver = Driver(engine)
    row = driver.admit([1] * 62)
    driver.chunk(row, 32)
    driver.step()
    driver.chunk(row, 30)
    driver.step()
    driver.step()
    driver.step()

    with pytest.raises(PlanError, match="exceeds max_model_len 64"):
        driver.step()


COLUMN = st.lists(st.integers(-2, 9), max_size=4).map(to_column) | st.binary(max_size=9)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_plan_does_worse_than_be_refused(engine: Engine, answer: list[int], data: st.DataObject) -> None:
    """Any mutation of a good plan is executed or refused as a broken contract, and a reset makes all well again."""
    prepare(engine)
    plan = good_plan()
    columns = ["leaves", "append_rows", "append_blocks", "chunk_rows", "chunk_lengths"]
    columns += ["copy_sources", "copy_targets"]
    for name in data.draw(st.lists(st.sampled_from([*columns, "holds", "releases"]), max_size=3)):
        setattr(plan, name, data.draw(COLUMN))
    wire = bytearray(plan.SerializeToString())
    for position, value in data.draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2)):
        wire[position % len(wire)] = value
    try:
        execute(engine, plan_pb2.Plan.FromString(bytes(wire)))
        execute(engine, plan_pb2.Plan(step=3))
    except (PlanError, DecodeError):
        pass

    engine.reset()
    assert Driver(engine).generate(PROMPT, 6) == answer
