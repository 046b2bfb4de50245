"""What rows with recurrent state promise: the tokens of `generate`, and that no row sees the state of another one."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checks.driver import CPU, Driver, execute, make_engine
from measure.testbed.checkpoints import make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.config import ConfigError, WorkerConfig
from tests.worker_svc.oracle import Oracle, Verdict
from tests.worker_svc.test_speculation import guess
from worker_svc.interface.errors import PlanError
from worker_svc.link.decoding import decode_plan
from worker_svc.model.loader import load_model
from worker_svc.model.recurrent import RowStates, StateCounts, StateSave, StateShape

PROMPT = list(range(40, 75))
COUNT = 12


@pytest.fixture(scope="module", params=["Lfm2ForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a hybrid, a purely recurrent model, and one whose class ignores its state within chunks."""
    architecture: str = request.param
    return make_checkpoint(architecture, tmp_path_factory.mktemp(architecture))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    """Return the reference for its tokens."""
    return Oracle(checkpoint)


def _engine(checkpoint: Path) -> Driver:
    return Driver(make_engine(checkpoint, max_num_seqs=3, max_num_batched_tokens=128))


def _check(oracle: Oracle, prompt: list[int], answer: list[int]) -> None:
    verdict = Verdict()
    oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties == 0
    assert verdict.num_tokens == COUNT


def _decode(driver: Driver, rows: dict[int, list[int]]) -> None:
    """Compute `COUNT` tokens after the prompts of some rows, with chunks of different lengths."""
    length = 3
    while any(len(driver.rows[row].tokens) < len(prompt) + COUNT for row, prompt in rows.items()):
        for row in rows:
            state = driver.rows[row]
            if state.in_prefill:
                driver.chunk(row, min(length, state.num_known - state.computed))
                length = length % 11 + 4
        driver.step()


def test_continuations_of_one_prompt_each_have_their_state(checkpoint: Path, oracle: Oracle) -> None:
    """Rows with the same prompt, and a row with another one, are computed together in chunks and in decode."""
    driver = _engine(checkpoint)
    rows = {driver.admit(prompt): prompt for prompt in (PROMPT, PROMPT[:9], PROMPT)}
    _decode(driver, rows)

    for row, prompt in rows.items():
        _check(oracle, prompt, driver.rows[row].tokens[len(prompt) :][:COUNT])


def test_the_next_turn_begins_with_an_empty_state(checkpoint: Path, oracle: Oracle) -> None:
    """A request that uses the row of an ended or aborted one does not see its state."""
    driver = _engine(checkpoint)
    first = driver.generate(PROMPT, COUNT)
    _check(oracle, PROMPT, first)
    turn = [*PROMPT, *first, 7, 8, 9]
    row = driver.admit(turn, row=0)
    driver.chunk(row, 17)
    driver.step()
    driver.leave(row)  # Abort in the middle of the prompt.

    row = driver.admit(turn, row=0)
    _decode(driver, {row: turn})

    _check(oracle, turn, driver.rows[row].tokens[len(turn) :][:COUNT])


def test_a_preempted_row_continues_after_recomputation(checkpoint: Path, oracle: Oracle) -> None:
    """A row that left and is admitted again with its tokens gives the tokens that it would have given."""
    driver = _engine(checkpoint)
    row = driver.admit(PROMPT)
    driver.chunk(row, len(PROMPT))
    for _ in range(5):
        driver.step()
    tokens = driver.leave(row)
    driver.generate([5, 6, 7], 3)  # Meanwhile another request uses the row.

    row = driver.admit(tokens, row=row)
    _decode(driver, {row: PROMPT})

    _check(oracle, PROMPT, driver.rows[row].tokens[len(PROMPT) :][:COUNT])


def test_a_row_with_computed_tokens_is_refused(checkpoint: Path) -> None:
    """KV of a prefix does not suffice, so the plan violates the protocol."""
    driver = _engine(checkpoint)
    driver.generate(PROMPT, 3)
    blocks = [driver.take_block() for _ in range(3)]
    row = driver.admit(PROMPT, blocks=blocks, computed=16)
    driver.chunk(row, len(PROMPT) - 16)

    with pytest.raises(PlanError, match="recurrent state begins with the first token or with a checkpoint"):
        driver.step()


def test_a_row_continues_from_a_checkpoint(checkpoint: Path, oracle: Oracle) -> None:
    """A row that shares blocks and begins with a state, saved in a chunk or while decoding, gives its own tokens."""
    driver = _engine(checkpoint)
    first = driver.admit(PROMPT)
    driver.chunk(first, len(PROMPT))
    driver.save(first, 16, 0)
    driver.save(first, 32, 2)
    while driver.rows[first].computed < 48:
        driver.step()
    driver.save(first, 48, 1)  # before the step computes the next token
    driver.step()
    tokens, blocks = driver.rows[first].tokens, driver.rows[first].blocks
    turn = [*tokens[:48], 7, 8, 9]

    rows = {
        driver.admit(turn, blocks=blocks[:3], computed=48, checkpoint=1): turn,
        driver.admit([*PROMPT[:16], 3, 4], blocks=blocks[:1], computed=16, checkpoint=0): [*PROMPT[:16], 3, 4],
    }
    _decode(driver, rows)
    driver.leave(first)
    again = driver.admit(PROMPT, row=first, blocks=blocks[:2], computed=32, checkpoint=2)
    rows[again] = PROMPT
    _decode(driver, rows)

    for row, prompt in rows.items():
        _check(oracle, prompt, driver.rows[row].tokens[len(prompt) :][:COUNT])


def test_the_state_of_the_former_request_is_not_saved(checkpoint: Path, oracle: Oracle) -> None:
    """A new request's state is saved, although the row's former one had as many tokens."""
    driver = _engine(checkpoint)
    former = driver.admit(list(range(60, 95)))
    driver.chunk(former, 32)
    driver.step()
    driver.leave(former)
    row = driver.admit(PROMPT, row=former)
    driver.chunk(row, len(PROMPT))
    driver.save(row, 32, 0)
    driver.step()

    again = driver.admit(PROMPT, blocks=driver.rows[row].blocks[:2], computed=32, checkpoint=0)
    _decode(driver, {again: PROMPT})

    _check(oracle, PROMPT, driver.rows[again].tokens[len(PROMPT) :][:COUNT])


def test_a_swapped_row_continues_at_its_newest_token(checkpoint: Path, oracle: Oracle) -> None:
    """KV and state of a row move to host memory and back, while another request uses its row and its blocks."""
    engine = make_engine(checkpoint, max_num_seqs=3, max_num_batched_tokens=128, host_cache="1MiB")
    place = engine.limits.num_checkpoints
    assert engine.limits.num_host_states >= 3
    driver = Driver(engine)
    row = driver.admit(PROMPT)
    driver.chunk(row, len(PROMPT))
    for _ in range(5):
        driver.step()
    computed, blocks = driver.rows[row].computed, list(driver.rows[row].blocks)
    driver.save(row, computed, place)
    driver.plan.swap_out_blocks, driver.plan.swap_out_host_blocks = to_column(blocks), to_column(range(len(blocks)))
    driver.plan.copy_ids = to_column([1])
    tokens = driver.leave(row)
    driver.admit([5, 6, 7, *PROMPT[::-1]], row=row, blocks=blocks)
    driver.chunk(row, 3 + len(PROMPT))
    driver.step()

    others = [driver.take_block() for _ in blocks]
    again = driver.admit(tokens, blocks=others, computed=computed, checkpoint=place)
    driver.plan.swap_in_host_blocks, driver.plan.swap_in_blocks = to_column(range(len(blocks))), to_column(others)
    driver.plan.copy_ids = to_column([2])
    _decode(driver, {again: PROMPT})

    assert driver.rows[again].num_known - computed == 1
    _check(oracle, PROMPT, driver.rows[again].tokens[len(PROMPT) :][:COUNT])


def test_a_row_continues_from_a_checkpoint_that_was_copied_to_the_host(checkpoint: Path, oracle: Oracle) -> None:
    """If the same plan saves the checkpoint, the copy has the earlier state. A row of that plan can begin with it.

    The copies are measured.
    """
    driver = Driver(make_engine(checkpoint, max_num_seqs=4, host_cache="1MiB", block_size=8))
    place = driver.engine.limits.num_checkpoints
    first = driver.admit(PROMPT)
    driver.chunk(first, 32)
    driver.save(first, 32, 0)
    driver.step()
    blocks = driver.rows[first].blocks[:4]
    other = driver.admit(PROMPT[::-1])
    driver.chunk(other, 16)
    driver.keep(0, place)
    driver.save(other, 16, 0)
    rows = {driver.admit(PROMPT, blocks=blocks, computed=32, checkpoint=place): PROMPT}
    result = execute(driver.engine, driver.finish_plan())
    driver.take(result)
    timings = result.timings
    assert timings.copied_blocks == 2 * driver.engine.limits.state_blocks > 0
    assert timings.copy_delay_ns == timings.copy_ns > 0

    rows[other] = PROMPT[::-1]
    rows[driver.admit(PROMPT, blocks=blocks, computed=32, checkpoint=place)] = PROMPT
    _decode(driver, rows)
    for row, prompt in rows.items():
        _check(oracle, prompt, driver.rows[row].tokens[len(prompt) :][:COUNT])


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(6, 6)], r"a checkpoint is outside \[0, 6\)"),
        ([(0, 5)], r"a place is outside \[6, 10\)"),
        ([(0, 10)], r"a place is outside \[6, 10\)"),
        ([(0, 6), (1, 6)], "or occurs twice"),
    ],
)
def test_a_copy_out_of_range_is_refused(checkpoint: Path, pairs: list[tuple[int, int]], message: str) -> None:
    """The plan violates the protocol."""
    limits = dataclasses.replace(_engine(checkpoint).engine.limits, num_host_states=4)
    plan = plan_pb2.Plan(step=1)
    for each in pairs:
        plan.kept_checkpoints += to_column([each[0]])
        plan.kept_places += to_column([each[1]])

    with pytest.raises(PlanError, match=message):
        decode_plan(plan, limits)


def test_the_state_of_a_row_that_stays_is_not_saved_to_the_host(checkpoint: Path) -> None:
    """The plan violates the protocol."""
    driver = Driver(make_engine(checkpoint, max_num_seqs=3, host_cache="1MiB"))
    row = driver.admit(PROMPT)
    driver.chunk(row, 20)
    driver.save(row, 20, driver.engine.limits.num_checkpoints)

    with pytest.raises(PlanError, match="a row that does not leave is saved to host memory"):
        driver.step()


def test_the_state_of_another_token_is_not_saved_to_the_host(checkpoint: Path) -> None:
    """A plan that gives the wrong number of tokens for a row that has not failed violates the protocol."""
    driver = Driver(make_engine(checkpoint, max_num_seqs=3, host_cache="1MiB"))
    row = driver.admit(PROMPT)
    driver.chunk(row, 20)
    driver.step()
    driver.save(row, 21, driver.engine.limits.num_checkpoints)
    driver.leave(row)

    with pytest.raises(PlanError, match="row 0 has 20 computed tokens, not 21"):
        driver.step()


def test_a_state_in_host_memory_is_dropped_if_its_row_has_failed() -> None:
    """A former state in the same place is not restored instead."""
    states = RowStates([StateShape((2,), torch.float32)], StateCounts(2, checkpoints=1, host_states=1), CPU)
    states.close([0], [4], [torch.ones(1, 2)])
    states.save(StateSave(0, 4, 1))
    states.restore(1, 4, 1)
    assert states.open([1], [4]).tensors[0][1].tolist() == [1, 1]

    states.forget(1)

    with pytest.raises(RuntimeError, match="has the state after -1 tokens"):
        states.restore(0, 4, 1)


def test_a_checkpoint_of_another_length_is_not_restored(checkpoint: Path) -> None:
    """The step fails rather than compute tokens from the wrong state."""
    driver = _engine(checkpoint)
    row = driver.admit(PROMPT)
    driver.chunk(row, len(PROMPT))
    driver.save(row, 16, 1)
    driver.step()
    driver.admit(PROMPT, blocks=driver.rows[row].blocks[:2], computed=32, checkpoint=1)

    with pytest.raises(RuntimeError, match="the state after 16 tokens, but the plan copies the state after 32"):
        driver.step()


@pytest.mark.parametrize(
    ("row", "length", "slot", "message"),
    [(0, 16, 9, r"outside \[0, 6\)"), (0, 0, 1, "a state without tokens"), (7, 16, 1, "save: a row is outside")],
)
def test_a_save_out_of_range_is_refused(checkpoint: Path, row: int, length: int, slot: int, message: str) -> None:
    """The plan violates the protocol."""
    driver = _engine(checkpoint)
    driver.admit(PROMPT)
    driver.chunk(0, 20)
    driver.save(row, length, slot)

    with pytest.raises(PlanError, match=message):
        driver.step()


@pytest.mark.drawn(4)
@pytest.mark.parametrize("seed", range(3))
def test_drafts_give_the_tokens_of_single_steps(checkpoint: Path, oracle: Oracle, seed: int) -> None:
    """States are rolled back after rejected drafts, also while other rows have none, wait, leave or are in prefill."""
    prompts = [PROMPT, PROMPT[:9], PROMPT[::-1]]
    settings: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 8}
    answers = [Driver(make_engine(checkpoint, **settings)).generate(prompt, 8 * COUNT) for prompt in prompts]
    engine = make_engine(checkpoint, speculation="ngram", **settings)
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    guess(engine, known, seed=seed, wrong=0.25)
    driver, rng = Driver(engine), np.random.default_rng(seed)
    for prompt in (*prompts, prompts[0]):
        if not driver.free_rows():
            driver.leave(0)
        row = driver.admit(prompt)
        driver.chunk(row, len(prompt))
        driver.step()
        driver.speculate(row, 4)
        for _ in range(3):
            driver.step()
    while any(len(driver.rows[row].tokens) < driver.rows[row].num_known + COUNT for row in driver.rows):
        for row, state in driver.rows.items():
            is_done = len(state.tokens) >= state.num_known + COUNT
            if state.held and not is_done:
                driver.release(row)
            elif not state.held and (is_done or rng.random() < 0.3):
                driver.hold(row)
        driver.step()
    assert 0 < driver.num_accepted < driver.num_drafted

    for state in driver.rows.values():
        prompt = state.tokens[: state.num_known]
        _check(oracle, prompt, state.tokens[len(prompt) :][:COUNT])


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_the_state_at_a_block_boundary_is_saved_while_drafts_are_verified(
    checkpoint: Path, oracle: Oracle, wrong: float
) -> None:
    """A save that is due in a later step has the state of exactly that token, whether drafts are rejected or not."""
    settings: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 8}
    answer = Driver(make_engine(checkpoint, **settings)).generate(PROMPT, 3 * COUNT)
    engine = make_engine(checkpoint, speculation="ngram", **settings)
    guess(engine, [[*PROMPT, *answer]], seed=1, wrong=wrong)
    driver = Driver(engine)
    row = driver.admit(PROMPT)
    driver.chunk(row, len(PROMPT))
    driver.step()
    driver.speculate(row, 4)
    driver.save(row, 40, 1)
    driver.save(row, 48, 2)
    while len(driver.rows[row].tokens) < 56:
        driver.step()
    assert driver.num_accepted
    driver.hold(row)

    for length, slot in ((40, 1), (48, 2)):
        prompt = driver.rows[row].tokens[: length + 1]
        other = driver.admit(prompt, blocks=driver.rows[row].blocks[: length // 8], computed=length, checkpoint=slot)
        driver.chunk(other, 1)
        while len(driver.rows[other].tokens) < len(prompt) + COUNT:
            driver.step()
        _check(oracle, prompt, driver.leave(other)[len(prompt) :][:COUNT])


def test_a_save_is_replaced_by_a_later_one_to_the_same_checkpoint() -> None:
    """The former row reaches its length, but no longer saves its state there."""
    states = RowStates([StateShape((2,), torch.float32)], StateCounts(2, checkpoints=1), CPU)
    states.postpone(StateSave(0, 8, 0))
    states.close([0, 1], [8, 4], [torch.ones(2, 2)])
    states.save(StateSave(1, 4, 0))
    states.save_due(np.array([8, 4]))
    states.restore(0, 4, 0)

    states.postpone(StateSave(1, 8, 0))
    assert states.draft_ends == {1: 8}
    states.leave(1)
    assert not states.draft_ends


def test_settings_that_copy_a_state_to_disk_are_refused(checkpoint: Path) -> None:
    """The line names the setting and what to use."""
    with pytest.raises(ConfigError, match="disk_cache: recurrent state is not copied to disk"):
        make_engine(checkpoint, disk_cache="/x")
    with pytest.raises(ConfigError, match=r"host_cache: 600 has [0-9]+ bytes for recurrent state.*or use 0"):
        make_engine(checkpoint, host_cache="600")


def test_states_are_counted_in_the_memory(checkpoint: Path) -> None:
    """States take their share of `kv_cache_memory`; too many rows are refused, a default number is reduced."""
    model, _ = load_model(WorkerConfig(model=str(checkpoint), device="cpu", dtype="float32"), CPU)
    state = model.state_bytes
    assert state > 0

    with pytest.raises(ConfigError, match=f"the recurrent state of 3 rows takes {3 * state:,} bytes"):
        make_engine(checkpoint, max_num_seqs=3, kv_cache_memory=str(3 * state - 1))
    share = 2 if model.kv_shapes else 1
    engine = make_engine(checkpoint, kv_cache_memory=str(5 * state * share), block_size=2, max_model_len=8)
    assert engine.limits.max_rows == 5
    assert engine.limits.num_checkpoints == 2 * (share - 1)
    kv = sum(tensor.nbytes for pair in engine._caches for tensor in pair)
    assert kv <= 3 * state * (share - 1)
    with pytest.raises(ConfigError, match=f"state_checkpoints: 3 take {3 * state:,} bytes"):
        make_engine(checkpoint, max_num_seqs=3, state_checkpoints=3, kv_cache_memory=str(5 * state))


def test_a_state_at_another_token_is_not_read() -> None:
    """The step fails rather than compute tokens from the wrong state."""
    states = RowStates([StateShape((2, 3), torch.float32)], StateCounts(4), CPU)
    written = torch.arange(12.0).view(2, 2, 3)
    states.close([3, 1], [7, 5], [written])

    with pytest.raises(RuntimeError, match="that of row 3 is computed for 7 tokens, but the step begins at token 8"):
        states.open([1, 3], [5, 8])
    opened = states.open([1, 3], [5, 7])
    assert opened.span is None
    assert torch.equal(opened.tensors[0][opened.places], written.flip(0))


def test_a_state_is_not_read_after_an_unfinished_pass() -> None:
    """A pass that failed may have changed the states of its rows in place; `close` makes them valid again."""
    states = RowStates([StateShape((2,), torch.float32)], StateCounts(3), CPU)
    opened = states.open([1, 2], [0, 0])
    assert opened.span is not None
    view = opened.tensors[0][opened.span]
    view += 1

    with pytest.raises(RuntimeError, match="that of row 1 is computed for -1 tokens"):
        states.open([1], [0])
    states.close([1, 2], [4, 5], [view])
    assert states.open([2], [5]).tensors[0].tolist() == [[0, 0], [1, 1], [1, 1]]
