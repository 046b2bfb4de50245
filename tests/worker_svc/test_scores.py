"""Log-probabilities and rules through the engine, against `transformers` on whole sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from services.streams.logprobs import read_scores
from shared.columns import to_column

PROMPT = [5, 9, 17, 3, 3, 8, 21, 4, 60, 2, 11]
COUNT = 12
ROUNDING = 2e-4
"""Of a log-probability in float32 after two layers; tokens nearer to each other may change places."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("chunk", [3, 11])
def test_logprobs_are_the_models_own(checkpoint: Path, chunk: int) -> None:
    """Log-probabilities of sampled tokens and of prompts are the model's own, for any chunks and any other rows.

    The options that change sampling do not affect them.
    """
    driver = Driver(make_engine(checkpoint, max_num_seqs=3))
    plain = driver.admit([1, 2, 3])
    fewer = driver.admit([4, 5], sampling=plan_pb2.SamplingParams(logprobs=1))
    asking = driver.admit(
        PROMPT,
        sampling=plan_pb2.SamplingParams(
            temperature=0.7, seed=3, top_p=1, repetition_penalty=1.7, logprobs=4, prompt_logprobs=2
        ),
    )
    driver.chunk(plain, 3)
    driver.chunk(fewer, 2)
    found: dict[int, list[float]] = {fewer: [], asking: []}
    top: list[list[int]] = []
    of_prompt: dict[int, tuple[float, int, list[int]]] = {}
    while len(driver.rows[asking].tokens) < len(PROMPT) + COUNT:
        row = driver.rows[asking]
        if row.in_prefill:
            driver.chunk(asking, min(chunk, len(PROMPT) - row.computed))
        driver.step()
        for scores in driver.last_result.scores:
            for index, scored in enumerate(read_scores(scores.scores), scores.prompt_index):
                if scores.prompt_index:
                    of_prompt[index] = (scored.logprob, scored.rank, [token for token, _ in scored.top])
                else:
                    found[scores.row].append(scored.logprob)
                    if scores.row == asking:
                        top.append([token for token, _ in scored.top])

    reference = _log_softmax(checkpoint, driver.rows[asking].tokens)
    picked = driver.rows[asking].tokens
    assert found[asking] == pytest.approx([float(reference[i - 1, picked[i]]) for i in range(11, 23)], abs=ROUNDING)
    for index, best in enumerate(top, 11):
        _assert_most_likely(best, 4, reference[index - 1])
    assert sorted(of_prompt) == list(range(1, len(PROMPT)))
    for index, (logprob, rank, best) in of_prompt.items():
        line = reference[index - 1]
        expected = float(line[PROMPT[index]])
        assert logprob == pytest.approx(expected, abs=ROUNDING)
        assert int((line > expected + ROUNDING).sum()) + 1 <= rank <= int((line >= expected - ROUNDING).sum())
        _assert_most_likely(best, 2, line)
    other = driver.rows[fewer].tokens
    reference = _log_softmax(checkpoint, other)
    expected_scores = [float(reference[i - 1, other[i]]) for i in range(2, len(other))]
    assert found[fewer] == pytest.approx(expected_scores, abs=ROUNDING)


def test_greedy_tokens_with_rules_equal_generate(checkpoint: Path) -> None:
    """Greedy tokens with all rules together equal `generate` of transformers, also for a row that was preempted.

    The rules are repetition penalty, bad words, bias, forbidden tokens and a least length, different for each row.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")

    def generate(**options: object) -> list[int]:
        output = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0, **options
        )
        tokens: list[int] = output[0, len(PROMPT) :].tolist()
        return tokens

    free = generate()
    words = [[free[0], free[1]], [free[0], free[2], free[3]]]
    penalised = plan_pb2.SamplingParams(repetition_penalty=1.5, bad_words=[to_column(word) for word in words])
    biased = plan_pb2.SamplingParams(
        bias_token_ids=to_column([free[0]]),
        bias_values=np.array([-5.0], "<f4").tobytes(),
        banned_token_ids=to_column([free[1]]),
        min_tokens=COUNT,
        stop_token_ids=to_column([free[2]]),
    )
    expected = {
        0: free,
        1: generate(repetition_penalty=1.5, bad_words_ids=words),
        2: generate(sequence_bias={(free[0],): -5.0}, suppress_tokens=[free[1], free[2]]),
    }
    engine = make_engine(checkpoint, max_num_seqs=4)
    driver = Driver(engine)
    for sampling in (plan_pb2.SamplingParams(), penalised, biased):
        driver.chunk(driver.admit(PROMPT, sampling=sampling), len(PROMPT))
    for _ in range(COUNT // 2):
        driver.step()

    known = driver.leave(1)
    row = driver.admit(known, row=1, sampling=penalised)
    driver.plan.admissions[-1].num_prompt_tokens = len(PROMPT)
    driver.chunk(row, len(known))
    while min(len(each.tokens) for each in driver.rows.values()) < len(PROMPT) + COUNT:
        driver.step()

    assert {row: each.tokens[len(PROMPT) :][:COUNT] for row, each in driver.rows.items()} == expected
    assert len({tuple(answer) for answer in expected.values()}) == 3, "the rules changed nothing"


def test_a_row_without_choice_fails_alone(checkpoint: Path) -> None:
    """Options that together allow no token fail only their row, and the failure names the fields to change.

    The failure may be reported several times.
    """
    driver = Driver(make_engine(checkpoint, max_num_seqs=2))
    one = plan_pb2.SamplingParams(allowed_token_ids=to_column([7]), stop_token_ids=to_column([7]), min_tokens=2)
    stuck, fine = driver.admit(PROMPT, sampling=one), driver.admit(PROMPT)
    driver.chunk(stuck, len(PROMPT))
    driver.chunk(fine, len(PROMPT))

    assert list(driver.step()) == [fine]
    (failure,) = driver.last_result.failures
    assert (failure.row, failure.kind) == (stuck, plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED)
    assert failure.field == "sampling.allowed_token_ids"
    assert "together with min_tokens; relax one of them" in failure.reason
    # A scheduler that has not yet received this failure still sends steps for the row.
    assert list(driver.step()) == [fine]
    assert list(driver.last_result.failures) == [failure]


def _assert_most_likely(tokens: list[int], count: int, line: torch.Tensor) -> None:
    """`tokens` are the `count` most likely ones of a line of log-probabilities, in order."""
    assert len(set(tokens)) == count
    assert line[tokens].tolist() == pytest.approx(line.topk(count).values.tolist(), abs=ROUNDING)


def _log_softmax(checkpoint: Path, tokens: list[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    assert logits.shape[1] == VOCAB_SIZE
    return logits.log_softmax(dim=-1)
