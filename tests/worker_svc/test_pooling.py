"""Embeddings through the engine, against `transformers`' last hidden states of whole sequences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import make_checkpoint
from protos.quire.plan.v1 import plan_pb2
from tests.cpu_kernels import cpu_kernels
from tests.worker_svc.fake_accelerator import FakeAccelerator
from worker_svc.interface.errors import PlanError
from worker_svc.model import hf
from worker_svc.model.hf_cache import CacheModel

LAST, MEAN = plan_pb2.POOLING_LAST, plan_pb2.POOLING_MEAN
PROMPT = [5, 9, 17, 3, 3, 8, 21, 4, 60, 2, 11, 90, 7, 7, 31, 12, 44, 6, 100]
"""Longer than the sliding windows of the checkpoints, and than a block."""


def last_hidden_states(folder: Path, tokens: list[int]) -> torch.Tensor:
    """`[tokens, hidden_size] float32`, computed by `transformers`."""
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([tokens])).last_hidden_state[0]
    return states


def admit_pooled(driver: Driver, tokens: list[int], mode: plan_pb2.Pooling.ValueType) -> int:
    """Admits a row that pools."""
    row = driver.admit(tokens)
    driver.plan.admissions[-1].pooling = mode
    return row


def embeddings(driver: Driver) -> dict[int, torch.Tensor]:
    """The vectors in the last result, by row."""
    found = driver.last_result.embeddings
    return {each.row: torch.from_numpy(np.frombuffer(each.values, "<f4").copy()) for each in found}


def pooled(driver: Driver, tokens: list[int], mode: plan_pb2.Pooling.ValueType, chunk: int) -> torch.Tensor:
    """The vector of a row that is computed chunk by chunk."""
    row = admit_pooled(driver, tokens, mode)
    while driver.rows[row].in_prefill:
        driver.chunk(row, min(chunk, len(tokens) - driver.rows[row].computed))
        assert row not in driver.step(), "a row that pools has sampled"
        assert (row in embeddings(driver)) != driver.rows[row].in_prefill
    vector = embeddings(driver)[row]
    driver.leave(row)
    return vector


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(
    "architecture",
    [
        *("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "GPT2LMHeadModel"),
        "Gemma4ForCausalLM",
    ],
)
def test_vectors_are_the_last_hidden_states(architecture: str, kernels: str, tmp_path: Path) -> None:
    """Last token and mean, in one chunk and in several, on each of the three ways through a model."""
    folder = make_checkpoint(architecture, tmp_path)
    states = last_hidden_states(folder, PROMPT)
    with cpu_kernels(kernels):
        driver = Driver(make_engine(folder))
        for chunk in (len(PROMPT), 7, 1):
            torch.testing.assert_close(pooled(driver, PROMPT, LAST, chunk), states[-1], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(pooled(driver, PROMPT, MEAN, chunk), states.mean(0), rtol=1e-3, atol=1e-3)


def test_vectors_of_the_cache_interface_are_those_of_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4 does not compute the last layers of all tokens if it is asked for the logits of the last token only."""
    folder = make_checkpoint("Gemma4ForCausalLM", tmp_path)
    states = last_hidden_states(folder, PROMPT)
    monkeypatch.setattr(hf, "_calls_interface", lambda *_: False)
    engine = make_engine(folder)
    assert isinstance(engine._model, CacheModel)
    vector = pooled(Driver(engine), PROMPT, MEAN, len(PROMPT))
    torch.testing.assert_close(vector, states.mean(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("on_accelerator", [False, True])
def test_rows_that_pool_and_rows_that_generate_share_steps(on_accelerator: bool, tmp_path: Path) -> None:
    """Rows that pool and rows that generate share steps without an effect on each other.

    Tokens equal those of rows alone, and vectors those of transformers, including chunks, log-probabilities and reused
    rows.
    """
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    states = last_hidden_states(folder, PROMPT)
    prompt = [4, 8, 15, 16, 23, 42]
    alone = Driver(make_engine(folder)).generate(prompt, 12)
    accelerator = FakeAccelerator() if on_accelerator else None
    driver = Driver(make_engine(folder, accelerator=accelerator, cuda_graphs=False))
    scored = plan_pb2.SamplingParams(logprobs=1, prompt_logprobs=1)
    first, second = driver.admit(prompt), driver.admit(prompt, sampling=scored)
    last, mean = admit_pooled(driver, PROMPT, LAST), admit_pooled(driver, PROMPT, MEAN)
    driver.chunk(first, 6)
    driver.chunk(second, 3)
    driver.chunk(last, len(PROMPT))
    driver.chunk(mean, 5)
    driver.step()
    assert embeddings(driver).keys() == {last}
    torch.testing.assert_close(embeddings(driver)[last], states[-1], rtol=1e-3, atol=1e-3)
    driver.leave(last)
    again = admit_pooled(driver, PROMPT, MEAN)
    assert again == last, "the row was to be used again"
    driver.chunk(second, 3)
    driver.chunk(mean, len(PROMPT) - 5)
    driver.chunk(again, 2)
    driver.step()
    torch.testing.assert_close(embeddings(driver)[mean], states.mean(0), rtol=1e-3, atol=1e-3)
    driver.chunk(again, len(PROMPT) - 2)
    driver.step()
    torch.testing.assert_close(embeddings(driver)[again], states.mean(0), rtol=1e-3, atol=1e-3)
    while len(driver.rows[second].tokens) < len(prompt) + 12:
        driver.step()
        assert not driver.last_result.embeddings, "a row that is done took part"

    assert driver.rows[first].tokens[6:][:12] == driver.rows[second].tokens[6:][:12] == alone


def test_a_vector_that_is_not_finite_fails_its_row_alone(tmp_path: Path) -> None:
    """NaN from the model is a failure with a reason; the step's other rows are not affected."""
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    engine = make_engine(folder)
    model: Any = engine._model
    forward = model.forward_hidden

    def spoilt(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, hidden = forward(*inputs)
        hidden[: len(PROMPT)] = torch.nan
        return logits, hidden

    model.forward_hidden = spoilt
    driver = Driver(engine)
    bad, good = admit_pooled(driver, PROMPT, MEAN), admit_pooled(driver, PROMPT, MEAN)
    generating = driver.admit(PROMPT)
    for row in (bad, good, generating):
        driver.chunk(row, len(PROMPT))

    assert driver.step().keys() == {generating}
    assert embeddings(driver).keys() == {good}
    (failure,) = driver.last_result.failures
    assert (failure.row, failure.reason) == (bad, "the model's hidden states are not finite")
    assert failure.kind == plan_pb2.ROW_FAILURE_KIND_NOT_FINITE


@pytest.mark.parametrize("wrong", [{"pooling": 7}, {"pooling": MEAN, "num_computed_tokens": 3}, {"grammar": b"g"}])
def test_an_admission_that_cannot_be_pooled_breaks_the_contract(wrong: dict[str, Any], tmp_path: Path) -> None:
    """Unknown ways to pool, a mean that lacks its first tokens, and a grammar are refused."""
    driver = Driver(make_engine(make_checkpoint("LlamaForCausalLM", tmp_path)))
    admit_pooled(driver, [1] * 20, LAST)
    for name, value in wrong.items():
        setattr(driver.plan.admissions[-1], name, value)
    driver.plan.admissions[-1].block_tables[0] = np.array([3], "<i4").tobytes()

    with pytest.raises(PlanError, match="admission"):
        driver.step()
