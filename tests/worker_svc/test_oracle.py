"""Greedy tokens of every architecture equal those of `transformers`, for any plans."""

from pathlib import Path

import pytest

from checks.driver import Driver, collect, launch, make_engine
from measure.testbed.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint
from tests.worker_svc.oracle import Oracle, Verdict

PROMPT_LENGTHS = (1, 5, 16, 33, 130, 300)
OUTPUT_LENGTH = 24
MAX_ROWS = 4


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    architecture: str = request.param
    return make_checkpoint(architecture, tmp_path_factory.mktemp(architecture))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    """Return the reference for its tokens."""
    return Oracle(checkpoint)


@pytest.mark.drawn(16)
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_greedy_tokens_equal_generate(checkpoint: Path, oracle: Oracle, block_size: int) -> None:
    """Prompts of 1 to 300 tokens give the oracle's tokens under random chunks, holds, row reuse and recomputation."""
    engine = make_engine(checkpoint, block_size=block_size, max_num_seqs=MAX_ROWS, max_num_batched_tokens=96)
    driver = Driver(engine, seed=block_size)
    prompts = [driver.rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]

    answers, events = generate_all(driver, prompts)

    assert all(events.values()), f"the schedule was too tame: {events}"
    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties * 1000 <= verdict.num_tokens, f"{verdict.near_ties} near ties"


def test_a_second_plan_may_be_launched_before_the_first_is_answered(checkpoint: Path, oracle: Oracle) -> None:
    """Step N + 1 continues from the tokens of step N, which its plan does not contain."""
    driver = Driver(make_engine(checkpoint, max_num_seqs=2))
    prompts = [[7, 8, 9], list(range(40))]
    for prompt in prompts:
        row = driver.admit(prompt)
        driver.chunk(row, len(prompt))

    launch(driver.engine, driver.finish_plan())
    for _ in range(OUTPUT_LENGTH - 1):
        launch(driver.engine, driver.finish_plan())
        driver.take(collect(driver.engine))
    driver.take(collect(driver.engine))

    verdict = Verdict()
    for row, prompt in enumerate(prompts):
        oracle.judge(prompt, driver.rows[row].tokens[len(prompt) :], verdict)
    assert verdict.near_ties == 0


def generate_all(
    driver: Driver, prompts: list[list[int]], draft_limit: int = 0
) -> tuple[list[list[int]], dict[str, int]]:
    """Generate `OUTPUT_LENGTH` tokens per prompt under a random schedule; also count the events in it."""
    rng = driver.rng
    waiting = list(enumerate(prompts))
    request_of: dict[int, int] = {}
    answers: list[list[int]] = [[] for _ in prompts]
    events = {"mixed": 0, "held": 0, "recomputed": 0}
    while waiting or request_of:
        while waiting and driver.free_rows():
            request, tokens = waiting.pop(0)
            row = driver.admit(tokens, row=int(rng.choice(driver.free_rows())))
            request_of[row] = request
            if draft_limit:
                driver.speculate(row, draft_limit)
        for row in list(request_of):
            state = driver.rows[row]
            if state.in_prefill:
                driver.chunk(row, int(rng.integers(1, min(20, state.num_known - state.computed) + 1)))
            elif state.held and rng.random() < 0.5:
                driver.release(row)
            elif not state.held and rng.random() < 0.1:
                driver.hold(row)
                events["held"] += 1
        in_prefill = sum(driver.rows[row].in_prefill for row in request_of)
        events["mixed"] += 0 < in_prefill < len(request_of)
        driver.step()

        for row, request in list(request_of.items()):
            state = driver.rows[row]
            done = len(state.tokens) - len(prompts[request])
            if done >= OUTPUT_LENGTH:
                answers[request] = driver.leave(row)[len(prompts[request]) :][:OUTPUT_LENGTH]
                del request_of[row]
            elif done > 2 and not state.in_prefill and rng.random() < 0.02:
                waiting.append((request, driver.leave(row)))
                del request_of[row]
                events["recomputed"] += 1
    return answers, events
