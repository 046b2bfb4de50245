"""What rows promise each other: none harms another, and randomness belongs to the request."""

from pathlib import Path

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file

from checks.driver import Driver, collect, execute, launch, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import from_column, to_column

POISON = 99
"""A token whose embedding is not a number."""


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that answers with NaN once it has seen `POISON`."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("poisoned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def failures(result: plan_pb2.StepResult) -> list[tuple[int, int]]:
    """Rows and generations that a result says have failed, all of them because of NaN."""
    assert all(failure.kind == plan_pb2.ROW_FAILURE_KIND_NOT_FINITE for failure in result.failures)
    return [(failure.row, failure.generation) for failure in result.failures]


def test_a_row_that_fails_harms_no_other(poisoned: Path) -> None:
    """NaN logits fail their row alone; it is answered as failed until it leaves; its blocks and row are reusable."""
    prompt, poison = [5, 6, 7], [1, 2, POISON]
    expected = Driver(make_engine(poisoned)).generate(prompt, 6)
    driver = Driver(make_engine(poisoned, block_size=8, max_num_seqs=2, kv_cache_memory="24KiB"))
    healthy, sick = driver.admit(prompt), driver.admit(poison)
    driver.chunk(healthy, 3)
    driver.chunk(sick, 3)

    first = driver.step()
    first_failures = failures(driver.last_result)
    second = driver.step()
    second_failures = failures(driver.last_result)
    driver.leave(sick)
    again = driver.admit(prompt, row=sick)
    driver.chunk(again, 3)
    while len(driver.rows[again].tokens) < 3 + 6:
        driver.step()

    assert set(first) == set(second) == {healthy}
    assert first_failures == second_failures == [(sick, 1)]
    assert driver.leave(healthy)[3:9] == expected
    assert driver.leave(again)[3:] == expected


def test_nan_is_reported_as_such_where_constraints_leave_a_choice_or_none(poisoned: Path) -> None:
    """A row with constraints whose logits are NaN has failed for NaN, even if the constraints leave no token either."""
    driver = Driver(make_engine(poisoned, max_num_seqs=3))
    stop = to_column([7])
    contradictory = plan_pb2.SamplingParams(allowed_token_ids=stop, stop_token_ids=stop, min_tokens=2)
    rows = [
        driver.admit([1, POISON], sampling=plan_pb2.SamplingParams(allowed_token_ids=stop)),
        driver.admit([1, POISON], sampling=contradictory),
        driver.admit([1, 2], sampling=contradictory),
    ]
    for row in rows:
        driver.chunk(row, 2)

    driver.step()

    nan, nothing = plan_pb2.ROW_FAILURE_KIND_NOT_FINITE, plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED
    assert {each.row: each.kind for each in driver.last_result.failures} == dict(
        zip(rows, (nan, nan, nothing), strict=True)
    )


def test_a_row_that_fails_is_logged_with_its_request(poisoned: Path) -> None:
    """Once, however many steps still count on the row."""
    driver = Driver(make_engine(poisoned))
    driver.admit([5, 6])
    sick = driver.admit([1, POISON])
    driver.chunk(0, 2)
    driver.chunk(sick, 2)

    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            driver.step()

    assert lines == [
        {
            "event": "row failed",
            "log_level": "warning",
            "request_id": f"request-{sick}",
            "row": sick,
            "kind": "not_finite",
            "reason": "the model's logits are not finite",
        }
    ]


def test_a_row_that_failed_is_answered_as_failed_by_a_step_already_launched(poisoned: Path) -> None:
    """Step N + 1 was launched before step N was known to have failed the row; its token is not delivered."""
    driver = Driver(make_engine(poisoned, max_num_seqs=2))
    row = driver.admit([1, POISON])
    driver.chunk(row, 2)
    plans = [driver.finish_plan(), driver.finish_plan()]

    for plan in plans:
        launch(driver.engine, plan)
    results = [collect(driver.engine) for _ in plans]

    assert [failures(result) for result in results] == [[(row, 1)], [(row, 1)]]
    assert [result.rows for result in results] == [b"", b""]


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(tmp_path: Path) -> None:
    """Random tokens depend on seed, choice and position, not on row, neighbours or interruptions."""
    folder = make_checkpoint("Qwen2ForCausalLM", tmp_path)
    sampling = plan_pb2.SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.01, seed=2**63 + 5, choice=2)
    prompt = list(range(20))
    alone = Driver(make_engine(folder)).generate(prompt, 16, sampling=sampling)

    driver = Driver(make_engine(folder, max_num_seqs=3), seed=1)
    for _ in range(2):
        row = driver.admit([8] * 11, sampling=plan_pb2.SamplingParams(temperature=0.7, seed=1))
        driver.chunk(row, 11)
    company = driver.generate(prompt, 7, sampling=sampling)
    company += driver.generate(prompt + company, 9, sampling=sampling)
    other = sampling.__deepcopy__()
    other.choice = 3

    assert company == alone
    assert Driver(make_engine(folder)).generate(prompt, 16, sampling=other) != alone


def test_a_row_may_start_from_blocks_that_hold_its_tokens_already(tmp_path: Path) -> None:
    """Computed tokens at admission are not computed again: a shared prefix's blocks serve a second row."""
    engine = make_engine(make_checkpoint("LlamaForCausalLM", tmp_path), block_size=8, max_num_seqs=2)
    prompt = [i % VOCAB_SIZE for i in range(3, 30)]
    expected = Driver(engine).generate(prompt, 2)
    engine.reset()
    first = plan_pb2.Admission(
        row=0, generation=1, token_ids=to_column(prompt), block_tables=[to_column([9, 2, 4, 7])], num_prompt_tokens=27
    )
    second = plan_pb2.Admission(
        row=1, generation=1, token_ids=to_column(prompt), block_tables=[to_column([9, 2, 4, 5])], num_computed_tokens=24
    )
    execute(engine, plan_pb2.Plan(step=1, admissions=[first], chunk_rows=to_column([0]), chunk_lengths=to_column([27])))

    result = execute(
        engine, plan_pb2.Plan(step=2, admissions=[second], chunk_rows=to_column([1]), chunk_lengths=to_column([3]))
    )

    assert from_column(result.rows).tolist() == [0, 1]
    assert from_column(result.tokens).tolist() == [expected[1], expected[0]]
    assert result.timings.num_tokens == 4


def test_a_plan_without_work_is_answered(tmp_path: Path) -> None:
    """A step without rows has an empty result."""
    driver = Driver(make_engine(make_checkpoint("LlamaForCausalLM", tmp_path)))
    row = driver.admit([1, 2, 3])

    driver.step()
    assert (driver.last_result.step, driver.last_result.rows) == (1, b"")
    driver.chunk(row, 3)
    assert set(driver.step()) == {row}
    driver.hold(row)
    assert driver.step() == {}
    driver.leave(row)
    assert driver.step() == {}


def test_times_of_a_step_add_up(tmp_path: Path) -> None:
    """A result says when its step began and how long its parts took, and idleness only after a step before it."""
    driver = Driver(make_engine(make_checkpoint("LlamaForCausalLM", tmp_path)))
    row = driver.admit([1, 2, 3])
    driver.chunk(row, 3)

    driver.step()
    first = driver.last_result.timings
    driver.step()
    second = driver.last_result.timings

    assert first.received_unix_ns <= first.started_unix_ns <= second.received_unix_ns <= second.started_unix_ns
    assert min(first.prepare_ns, first.forward_ns, first.sample_ns) > 0
    assert first.idle_before_ns == 0
    assert second.idle_before_ns > 0
    assert (first.num_tokens, second.num_tokens) == (3, 1)
