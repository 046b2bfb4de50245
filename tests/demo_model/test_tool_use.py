"""Tools in the corpus, in the chat template and in the committed checkpoint.

Promises: the template writes the form that the corpus teaches and accepts everything that clients send. Nothing held
out is trained on. The checkpoint calls the right tool for unseen questions.
"""

import asyncio
import json
import random
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.parsers import choose_family
from services.text.chat import TemplateInput
from services.text.chat_template import ChatTemplate
from tests.demo_model.test_corpus import CHECKPOINT, checkpoint
from tools.demo_model import evaluate, words
from tools.demo_model.corpus import ASSISTANT, BOS, CALL, EOS, MIDDLE, SYSTEM, USER, check_training_side, document
from tools.demo_model.errand import Errand
from tools.demo_model.split import is_held_out
from tools.demo_model.tokenizer import CHAT_TEMPLATE
from tools.demo_model.tool_use import draw_another, draw_errand


def rendered(messages: list[dict[str, Any]], tools: list[Any] | None = None, *, generate: bool = True) -> str:
    """Return the prompt that the server makes of a conversation."""
    conversation = TemplateInput(
        messages=messages, tools=tools, variables={}, add_generation_prompt=generate, continue_final_message=False
    )
    return ChatTemplate(CHAT_TEMPLATE, {"bos_token": BOS}).render(conversation)


def function(schema: object, name: str = "find", description: str = "Find it.") -> dict[str, Any]:
    """Return a tool in the form of OpenAI's API."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def called(errand: Errand) -> dict[str, Any]:
    """Return a tool call in the form of OpenAI's API, with the arguments as an object."""
    return {"type": "function", "function": {"name": errand.tool.name, "arguments": dict(errand.arguments)}}


def test_template_writes_the_dialogues_of_the_corpus() -> None:
    """Tools, a call and its result become the text on which the model was trained."""
    for task in evaluate.held_out_tasks(50, seed=3):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": task.errand.question},
            {"role": "assistant", "content": None, "tool_calls": [called(task.errand)]},
            {"role": "tool", "content": task.errand.result},
        ]
        tools = [tool.definition for tool in task.tools]

        assert rendered(messages[:1], tools) == BOS + task.asked
        assert rendered(messages, tools) == BOS + task.answer.prompt


def test_committed_template_is_the_generated_one() -> None:
    """The checkpoint has the template of the source, and the server reads its outputs as Hermes'."""
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())

    assert config["chat_template"] == CHAT_TEMPLATE
    assert choose_family(CHAT_TEMPLATE) == "hermes"


def test_system_message_and_tools_share_a_turn() -> None:
    """A system message precedes the tools; without tools, the turn is unchanged."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    assert rendered(messages) == f"{BOS}{SYSTEM}Be brief.{USER}Hi{ASSISTANT}"
    assert rendered(messages, [{"type": "function", "function": {"name": "now"}}]) == (
        f"{BOS}{SYSTEM}Be brief.\n\n<tools>\nnow()\n</tools>{USER}Hi{ASSISTANT}"
    )


def test_several_calls_and_their_results() -> None:
    """A message's calls are rendered after its text, in order; consecutive results share a turn."""
    call = {"function": {"name": "now", "arguments": {"a": [1, "é"]}}}
    broken = {"function": {"name": "now", "arguments": '{"a": '}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, broken, {"function": {"name": "now"}}]},
        {"role": "tool", "content": "12"},
        {"role": "tool", "content": ""},
        {"role": "user", "content": "And?"},
    ]

    assert rendered(messages, generate=False) == (
        f"{BOS}{ASSISTANT}Wait."
        '\n<tool_call>\n{"name": "now", "arguments": {"a": [1, "é"]}}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {"a": }\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        f"{EOS}{USER}<tool_response>\n12\n</tool_response>\n<tool_response>\n\n</tool_response>{USER}And?"
    )


@pytest.mark.parametrize(
    ("schema", "signature"),
    [
        (None, "()"),
        ({}, "()"),
        ({"type": "object", "properties": {}}, "()"),
        ({"$schema": "x", "properties": {"a": {"type": "string", "title": "A"}}}, "(a:string)"),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]}, "(b:integer)"),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "number"}]}}}, "(a:number)"),
        ({"properties": {"a": {"type": ["null", "string"]}, "b": {"enum": ["c", "d"]}}}, "(a:string,b:c|d)"),
        ({"properties": {"a": True, "b": {"$ref": "#/$defs/B"}, "c": {"enum": [1, None]}}}, "(a:any,b:any,c:1|None)"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}}}}, "(a:array)"),
    ],
)
def test_schemas_become_signatures(schema: object, signature: str) -> None:
    """A tool is one line with its required parameters and their types, or with all parameters if none is required."""
    prompt = rendered([{"role": "user", "content": "Hi"}], [function(schema)])

    assert f"<tools>\nFind it. -> find{signature}\n</tools>" in prompt


def test_long_descriptions_are_cut() -> None:
    """Only the start of a description's first line is shown, so that many tools fit into the context."""
    tools = [function({}, description="\n Find it. " + "x" * 5000 + "\nSecond line.")]

    prompt = rendered([{"role": "user", "content": "Hi"}], tools)

    assert "Find it. xxx" in prompt
    assert "xxx -> find()" in prompt
    assert len(prompt) < 250
    assert "Second" not in prompt


def test_no_held_out_errand_is_ever_written() -> None:
    """No held-out country occurs in the corpus, and the generator stops at a held-out errand."""
    rng = random.Random(11)
    text = " ".join(document(rng, MIDDLE, 512).text for _ in range(2000))
    held_out = {country for country in words.COUNTRIES if is_held_out("country", country)}

    assert text.count(CALL) > 500
    assert not held_out & set(re.findall(r"\w+", text))
    with pytest.raises(AssertionError, match="held out"):
        check_training_side(draw_errand(rng, held_out=True))


def test_errands_for_measuring_are_reproducible_and_held_out() -> None:
    """The list depends only on its arguments, and each question has exactly one tool that answers it."""
    tasks = evaluate.held_out_tasks(100, seed=1)

    assert tasks == evaluate.held_out_tasks(100, seed=1)
    assert all(task.errand.held_out and task.tools.count(task.errand.tool) == 1 for task in tasks)


def test_arguments_stand_in_the_question() -> None:
    """Each argument in the corpus can be copied from the question, or is the first option of its type."""
    rng = random.Random(2)
    for _ in range(500):
        errand = draw_errand(rng)
        options = [kind.split("|")[0] for _, kind in errand.tool.parameters if "|" in kind]
        if errand.subject != "calculator":
            assert all(str(value) in errand.question or value in options for _, value in errand.arguments), errand


def test_another_errand_has_the_same_tool() -> None:
    """A tool can be needed twice in a dialogue."""
    rng = random.Random(5)
    errands = [draw_errand(rng) for _ in range(200)]
    others = [draw_another(rng, errand) for errand in errands]

    assert all(errand.tool == other.tool for errand, other in zip(errands, others, strict=True))
    assert sum(errand.question != other.question for errand, other in zip(errands, others, strict=True)) > 150


def test_names_have_the_same_tokens_everywhere() -> None:
    """A capitalised word or a number has the same tokens in a question, in JSON and in an answer."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    for value in ("San Francisco", "Reykjavik", "Dorlan", "AB-1042", "4821"):
        alone = " ".join(tokenizer.encode(value, add_special_tokens=False).tokens)
        for text in (f"What is the weather in {value}?", f'{{"city": "{value}"}}', f"{value} is a city."):
            assert f" {alone} " in f" {' '.join(tokenizer.encode(text, add_special_tokens=False).tokens)} "


def test_checkpoint_calls_tools_as_well_as_stated() -> None:
    """On a sample, calls and answers are as good as quality.json states, within the sample's error."""
    model, tokenizer = checkpoint()
    stated = json.loads((CHECKPOINT / evaluate.QUALITY_FILE).read_text())
    complete = evaluate.generate_with(model, tokenizer)
    tasks = evaluate.held_out_tasks(40, seed=2)

    calls = asyncio.run(evaluate.score([task.call for task in tasks], complete, max_tokens=evaluate.CALL_TOKENS))
    answers = asyncio.run(evaluate.score([task.answer for task in tasks], complete))

    assert calls.accuracy >= stated["tool_call_accuracy"] - 0.1, calls.wrong
    assert answers.accuracy >= stated["tool_answer_accuracy"] - 0.1, answers.wrong
