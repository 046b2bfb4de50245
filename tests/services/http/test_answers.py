"""Answers of chats in OpenAI's form: reasoning, content and tool calls of a model's output."""

from functools import partial
from typing import Any

import pytest

from quire.v1 import generation_pb2 as v1
from services.http.whole_answer import WholeAnswer
from services.parsers import FAMILIES
from tests.services.parsed import deltas

OUTPUT = '<think>\nhm\n</think>\n\nOne moment.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def answer_of(
    output: str, cut: int, read: Any, reason: v1.FinishReason.ValueType, *, reasons: bool = False
) -> dict[str, Any]:
    """Return the choice of the whole answer to an output that arrives in two deltas."""
    answer = WholeAnswer(chat=True, id="id", model="m", n=1, prompts=1)
    answer.begin_prompt(0, [1, 2, 3])
    responses = deltas((output[:cut], output[cut:]), read=read, reasons=reasons)
    responses.append(v1.GenerateResponse(finished=v1.Finished(reason=reason)))
    for response in responses:
        answer.events(0, response)
    (choice,) = answer.whole()["choices"]
    assert isinstance(choice, dict)
    return choice


read_hermes = partial(answer_of, read=FAMILIES["hermes"].read)


@pytest.mark.parametrize("cut", [0, 5, 12, 30, 47, 60, 80, len(OUTPUT)])
def test_an_output_becomes_a_message(cut: int) -> None:
    """Reasoning, content and calls have separate fields, wherever the output is split."""
    choice = read_hermes(OUTPUT, cut, reason=v1.FINISH_REASON_STOP)

    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "One moment.")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "f", "arguments": '{"a": 1}'}]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("energy_j", [0.0, 1.5])
def test_usage_has_the_energy_of_all_prompts_if_it_is_known(energy_j: float) -> None:
    """Without measured energy, the field is missing."""
    answer = WholeAnswer(chat=False, id="id", model="m", n=1, prompts=2)
    for prompt in range(2):
        answer.begin_prompt(prompt, [1, 2, 3])
        usage = v1.Usage(prompt_tokens=3, completion_tokens=1, energy_j=energy_j)
        response = v1.GenerateResponse(finished=v1.Finished(reason=v1.FINISH_REASON_STOP, usage=usage))
        answer.events(prompt, response)

    assert answer.whole()["usage"].get("energy_j") == (2 * energy_j or None)


def test_an_output_may_begin_within_reasoning() -> None:
    """The closing marker alone ends the reasoning when the prompt has opened it."""
    message = read_hermes("hm</think>Yes.", 4, reason=v1.FINISH_REASON_STOP, reasons=True)["message"]

    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("output", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}', [("f", '{"a": 1}')]),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ', [("f", '{"a": ')]),
        ('<tool_call>\n{"name": "f"', [("f", "")]),
        ('<tool_call>\n{"na', []),
        ("", []),
    ],
)
def test_a_forced_call_that_is_cut_off_is_shown(output: str, calls: list[tuple[str, str]]) -> None:
    """At max_tokens, the answer has the calls so far, and finish_reason is length."""
    choice = read_hermes(output, 3, reason=v1.FINISH_REASON_LENGTH)

    found = [call["function"] for call in choice["message"].get("tool_calls", [])]
    assert [(function["name"], function["arguments"]) for function in found] == calls
    assert choice["finish_reason"] == "length"


def test_other_text_is_content() -> None:
    """An output without markers has neither reasoning nor calls."""
    message = read_hermes("a < b", 3, reason=v1.FINISH_REASON_STOP)["message"]

    assert message == {"role": "assistant", "content": "a < b", "refusal": None}
