"""A group of ranks computes and samples what one process does."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.worker_svc.driver import Driver, make_engine
from tests.worker_svc.oracle import Oracle, Verdict
from tests.worker_svc.ranks import Ranks, ranks
from tests.worker_svc.test_oracle import generate_all
from worker_svc.model.families import ARCHITECTURES

PROMPT_LENGTHS = (1, 5, 33, 130)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Two ranks."""
    with ranks(2) as started:
        yield started


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_generate(architecture: str, pair: Ranks, tmp_path: Path) -> None:
    """Every family of our own code gives the oracle's tokens on two ranks, whatever the plans look like."""
    folder = make_checkpoint(architecture, tmp_path)
    oracle = Oracle(folder)
    with pair.driver(folder, seed=3, max_num_seqs=4, max_num_batched_tokens=96) as driver:
        prompts = [driver.rng.integers(0, VOCAB_SIZE, length).tolist() for length in PROMPT_LENGTHS]
        answers, _ = generate_all(driver, prompts)

    verdict = Verdict()
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.judge(prompt, answer, verdict)
    assert verdict.near_ties * 1000 <= verdict.num_tokens, f"{verdict.near_ties} near ties"


SAMPLINGS = {
    "plain": plan_pb2.SamplingParams(temperature=1.5, seed=7),
    "top_p": plan_pb2.SamplingParams(temperature=1.5, seed=7, top_p=0.8, top_k=50),
    "logprobs": plan_pb2.SamplingParams(temperature=0.9, seed=8, logprobs=3, prompt_logprobs=2),
    "penalties": plan_pb2.SamplingParams(
        temperature=1.0, seed=9, repetition_penalty=1.4, banned_token_ids=to_column(list(range(0, VOCAB_SIZE, 2)))
    ),
    "greedy": plan_pb2.SamplingParams(),
}


def test_sampled_tokens_equal_those_of_one_process(pair: Ranks, tmp_path: Path) -> None:
    """Rows with and without filters, rules and log-probabilities, alone and in one batch, get the same tokens."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)

    def generate(driver: Driver) -> tuple[list[list[int]], list[list[int]], list[bytes]]:
        alone = [driver.generate([5, 6, 7, 8], 8, sampling=sampling) for sampling in SAMPLINGS.values()]
        scores = []
        rows = [driver.admit([9, 10, 11], sampling=sampling) for sampling in SAMPLINGS.values()]
        for row in rows:
            driver.chunk(row, 3)
        for _ in range(8):
            driver.step()
            scores += [section.SerializeToString() for section in driver.last_result.scores]
        return alone, [driver.leave(row) for row in rows], scores

    expected = generate(Driver(make_engine(folder)))
    with pair.driver(folder) as driver:
        found = generate(driver)

    assert found[:2] == expected[:2]
    assert len(found[2]) == len(expected[2]) > 0
