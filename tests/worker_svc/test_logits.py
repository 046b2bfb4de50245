"""Rules against `transformers`' processors on the same logits, and their state against any history of the row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from tests.examples import examples
from tests.worker_svc.values import LIMITS
from worker_svc.interface.errors import PlanError
from worker_svc.link.decoding import decode_sampling
from worker_svc.outputs.logits import LogitsRules

VOCAB = LIMITS.vocab_size
CPU = torch.device("cpu")


def floats(*values: float) -> bytes:
    """A column of float32."""
    return np.array(values, "<f4").tobytes()


def as_float32(value: float) -> float:
    """The number that a float field holds."""
    return float(np.float32(value))


def processed(
    params: plan_pb2.SamplingParams, tokens: list[int], num_prompt: int, logits: torch.Tensor
) -> torch.Tensor:
    """What the rules make of `logits` `[vocab_size]` after these tokens."""
    rules = LogitsRules(logits.shape[0], CPU)
    rules.admit(0, decode_sampling(params, LIMITS), np.array(tokens, np.int32), num_prompt)
    batch = rules.batch(np.array([0]))
    if batch is None:
        return logits
    return rules.apply(logits.unsqueeze(0), batch, np.array([len(tokens)]))[0]


TOKENS = st.integers(0, VOCAB - 1)


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_rules_are_those_of_transformers(data: st.DataObject) -> None:
    """Bias, forbidden tokens, penalties, bad words and least length together give the logits of transformers.

    The order of the processors is the same.
    """
    tokens = data.draw(st.lists(TOKENS, min_size=1, max_size=12))
    num_prompt = data.draw(st.integers(1, len(tokens)))
    bias = data.draw(st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4))
    banned = data.draw(st.lists(TOKENS, max_size=4, unique=True))
    penalty = as_float32(data.draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])))
    words = data.draw(st.lists(st.lists(TOKENS, min_size=2, max_size=3), max_size=3))
    min_tokens, stops = data.draw(st.integers(0, 6)), data.draw(st.lists(TOKENS, min_size=1, max_size=2))
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999)))) * 3
    params = plan_pb2.SamplingParams(
        bias_token_ids=to_column(list(bias)),
        bias_values=floats(*bias.values()),
        banned_token_ids=to_column(banned),
        repetition_penalty=penalty,
        bad_words=[to_column(word) for word in words],
        min_tokens=min_tokens,
        stop_token_ids=to_column(stops),
    )

    ids, expected = torch.tensor([tokens]), logits.unsqueeze(0)
    if bias:
        expected = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(ids, expected)
    if penalty != 1:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, expected)
    if words:
        expected = NoBadWordsLogitsProcessor(words)(ids, expected)
    if min_tokens:
        expected = MinNewTokensLengthLogitsProcessor(num_prompt, min_tokens, stops)(ids, expected)
    if banned:
        expected = SuppressTokensLogitsProcessor(banned)(ids, expected)

    assert torch.equal(processed(params, tokens, num_prompt, logits), expected[0])


def test_presence_and_frequency_count_the_output_alone() -> None:
    """As in OpenAI's definition: once, and once per occurrence; prompt tokens are not penalised."""
    params = plan_pb2.SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)

    changed = processed(params, [1, 2, 2, 3, 3, 3], 2, torch.zeros(VOCAB))

    expected = torch.zeros(VOCAB)
    expected[2], expected[3] = -0.75, -1.25
    assert torch.equal(changed, expected)


def test_only_allowed_tokens_are_left() -> None:
    """Everything else is at -inf; what is banned too is not allowed."""
    params = plan_pb2.SamplingParams(allowed_token_ids=to_column([3, 5, 7]), banned_token_ids=to_column([5]))

    changed = processed(params, [1], 1, torch.ones(VOCAB))

    assert changed.isfinite().nonzero().flatten().tolist() == [3, 7]


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_state_does_not_depend_on_how_it_came_about(data: st.DataObject) -> None:
    """Logits do not depend on whether a row counted its tokens one by one or was admitted with all of them.

    They do not depend on other rows either.
    """
    tokens = data.draw(st.lists(TOKENS, min_size=3, max_size=14))
    num_prompt = data.draw(st.integers(1, 2))
    split = data.draw(st.integers(num_prompt, len(tokens)))
    params = plan_pb2.SamplingParams(
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bad_words=[to_column(data.draw(st.lists(TOKENS, min_size=2, max_size=4)))],
    )
    logits = torch.randn(3, VOCAB)
    decoded = decode_sampling(params, LIMITS)
    rules = LogitsRules(VOCAB, CPU)
    for row in range(3):  # Include neighbouring rows and a previous request in the same row.
        rules.admit(row, decoded, np.array([5, 6, 7, 8], np.int32), 2)
    rules.admit(1, decoded, np.array(tokens[:split], np.int32), num_prompt)
    batch = rules.batch(np.array([0, 1, 2]))
    assert batch is not None
    for token in tokens[split:]:
        rules.count_sampled(batch, torch.tensor([9, token, 9]))
        rules.note_token(1, token)

    grown = rules.apply(logits, batch, np.array([9, len(tokens), 9]))[1]

    assert torch.equal(grown, processed(params, tokens, num_prompt, logits[1]))


def test_rows_without_rules_cost_nothing() -> None:
    """Neutral values make no rule, and a batch without rules has nothing to apply."""
    rules = LogitsRules(VOCAB, CPU)
    neutral = plan_pb2.SamplingParams(repetition_penalty=1.0, min_tokens=3)
    rules.admit(0, decode_sampling(neutral, LIMITS), np.array([1], np.int32), 1)

    assert len(rules) == 0
    assert rules.batch(np.array([0])) is None


@pytest.mark.parametrize(
    "params",
    [
        plan_pb2.SamplingParams(repetition_penalty=float("nan")),
        plan_pb2.SamplingParams(repetition_penalty=-1),
        plan_pb2.SamplingParams(banned_token_ids=to_column([VOCAB])),
        plan_pb2.SamplingParams(bias_token_ids=to_column([1]), bias_values=floats(float("nan"))),
        plan_pb2.SamplingParams(bad_words=[to_column([1])]),
    ],
)
def test_rules_that_make_no_sense_break_the_plan(params: plan_pb2.SamplingParams) -> None:
    """They are found at admission, not in the midst of a step."""
    with pytest.raises(PlanError, match="admission"):
        decode_sampling(params, LIMITS)
