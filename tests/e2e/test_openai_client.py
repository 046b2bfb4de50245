"""The official `openai` package works with a running Quire."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from measure.testbed.service import Served

ARITHMETIC = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture
def client(demo: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the official client without retries; its types include only OpenAI's own models and options."""
    # A proxy from the environment must not come between a test and its own server.
    monkeypatch.setenv("NO_PROXY", "*")
    with openai.OpenAI(base_url=f"http://{demo.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_conversation_is_answered(client: Any) -> None:
    """The bundled model answers, and usage, finish reason and ids are where the client looks for them."""
    answer = client.chat.completions.create(model="demo", messages=ARITHMETIC, temperature=0)

    assert "7" in (answer.choices[0].message.content or "")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream_is_the_whole_answer_in_pieces(client: Any) -> None:
    """The joined deltas equal the non-streaming response; the requested usage comes last."""
    whole = client.chat.completions.create(model="demo", messages=ARITHMETIC, temperature=0)
    stream = client.chat.completions.create(
        model="demo", messages=ARITHMETIC, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]

    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_prompt_is_completed(demo: Served, client: Any) -> None:
    """Completions take text or token ids, stop at stop strings, and stream."""
    ids = httpx.post(f"http://{demo.http}/tokenize", json={"prompt": "Once upon a time"}, trust_env=False).json()[
        "tokens"
    ]
    common = {"model": "demo", "temperature": 0, "max_tokens": 24, "stop": ["."]}
    from_text = client.completions.create(prompt="Once upon a time", **common)
    from_ids = client.completions.create(prompt=ids, **common)
    stream = client.completions.create(prompt="Once upon a time", stream=True, **common)

    assert from_text.choices[0].text == from_ids.choices[0].text
    assert "." not in from_text.choices[0].text
    assert from_text.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in stream) == from_text.choices[0].text


def test_several_prompts_and_choices_are_numbered(client: Any) -> None:
    """Two prompts with n = 3 give six choices, the first three of the first prompt."""
    answer = client.completions.create(
        model="demo", prompt=["The sun is", "The sea is"], n=3, max_tokens=4, temperature=1.0, seed=1, echo=True
    )

    assert [choice.index for choice in answer.choices] == list(range(6))
    assert all(choice.text.startswith("The sun is") for choice in answer.choices[:3])
    assert all(choice.text.startswith("The sea is") for choice in answer.choices[3:])
    assert len({choice.text for choice in answer.choices}) > 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 4


def test_choices_of_a_stream_come_interleaved(client: Any) -> None:
    """In a streamed chat completion, each choice has its own text, role and end."""
    stream = client.chat.completions.create(
        model="demo", messages=ARITHMETIC, n=2, max_tokens=5, stream=True, seed=7, extra_body={"ignore_eos": True}
    )
    roles: dict[int, list[str]] = {0: [], 1: []}
    ends: dict[int, list[str]] = {0: [], 1: []}
    for chunk in stream:
        for choice in chunk.choices:
            roles[choice.index] += [choice.delta.role] if choice.delta.role else []
            ends[choice.index] += [choice.finish_reason] if choice.finish_reason else []

    assert roles == {0: ["assistant"], 1: ["assistant"]}
    assert ends == {0: ["length"], 1: ["length"]}


def test_one_seed_gives_one_answer(client: Any) -> None:
    """Two requests with the same seed get the same output; vLLM's additional parameters are accepted."""
    extra = {"top_k": 50, "min_p": 0.01, "ignore_eos": True, "priority": -3, "cache_salt": "mine"}
    texts = {
        client.completions.create(
            model="demo", prompt="The old king", max_tokens=8, temperature=0.9, top_p=0.95, seed=5, extra_body=extra
        )
        .choices[0]
        .text
        for _ in range(2)
    }

    assert len(texts) == 1


def test_log_probabilities_come_in_both_forms(client: Any) -> None:
    """Chat and completions each have their own format for log-probabilities; greedy tokens rank first in both."""
    chat = client.chat.completions.create(
        model="demo", messages=ARITHMETIC, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    text = client.completions.create(
        model="demo", prompt="Once upon", temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    positions = chat.choices[0].logprobs.content
    logprobs = text.choices[0].logprobs

    assert len(positions) == 4
    for position in positions:
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].token == position.token
        assert position.logprob <= 0
        assert bytes(position.bytes).decode() == position.token
    assert "".join(position.token for position in positions) == chat.choices[0].message.content
    # The prompt begins with a beginning-of-sequence token. The echo has log-probabilities for all tokens but the first.
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) > 4
    assert logprobs.token_logprobs[0] is None
    assert all(score <= 0 for score in logprobs.token_logprobs[1:])
    assert all(len(top) == 2 for top in logprobs.top_logprobs[1:])
    assert "".join(logprobs.tokens[1:]) == text.choices[0].text
    whole = text.choices[0].text
    places = zip(logprobs.text_offset[1:], logprobs.tokens[1:], strict=True)
    assert all(whole.startswith(token, offset) for offset, token in places)


def test_a_prompt_is_scored_without_generating(client: Any) -> None:
    """Echo with no token to generate gives the prompt's log-probabilities and nothing else, as evaluations ask for."""
    longer = client.completions.create(
        model="demo", prompt="Once upon", temperature=0, max_tokens=1, logprobs=1, echo=True
    )
    scored = client.completions.create(
        model="demo", prompt="Once upon", temperature=0, max_tokens=0, logprobs=1, echo=True
    )

    assert scored.choices[0].text == "Once upon"
    assert scored.choices[0].finish_reason == "length"
    assert scored.usage.completion_tokens == 0
    assert scored.choices[0].logprobs.tokens == longer.choices[0].logprobs.tokens[:-1]
    assert scored.choices[0].logprobs.token_logprobs == longer.choices[0].logprobs.token_logprobs[:-1]


def test_log_probabilities_stream(client: Any) -> None:
    """A stream's log-probabilities joined are those of the whole answer."""
    common = {"model": "demo", "messages": ARITHMETIC, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**common).choices[0].logprobs.content
    chunks = client.chat.completions.create(stream=True, **common)
    found = [
        position.token
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for position in choice.logprobs.content
    ]

    assert found == [position.token for position in whole]


def test_the_models_are_listed(client: Any) -> None:
    """The list contains the served model, which can be requested by name; another name is 404."""
    (model,) = client.models.list().data

    assert model.id == "demo"
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_errors_are_of_the_clients_classes(client: Any) -> None:
    """A wrong value, a misspelt field, an unknown model and a passed deadline raise OpenAI's errors."""
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="demo", messages=ARITHMETIC, temperature=-1)
    with pytest.raises(openai.BadRequestError) as misspelt:
        client.chat.completions.create(model="demo", messages=ARITHMETIC, extra_body={"max_token": 5})
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=ARITHMETIC)
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(
            model="demo",
            prompt="And then",
            max_tokens=2000,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Timeout": "0.05"},
        )

    assert wrong.value.param == "temperature"
    assert misspelt.value.param == "max_token"
    assert "did you mean 'max_tokens'" in misspelt.value.message
    assert unknown.value.code == "model_not_found"
    assert late.value.status_code == 504
    assert late.value.code == "deadline"


def test_a_client_that_leaves_frees_its_memory(demo: Served, client: Any) -> None:
    """Closing a stream cancels its request, which ends as cancelled and holds no block any more."""
    cancelled = int(demo.metric("quire_requests_ended_total", reason="cancelled"))
    with client.completions.create(
        model="demo", prompt="And then", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        for _ in zip(range(5), stream, strict=False):
            pass

    demo.wait_until_empty(cancelled=cancelled + 1)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
UTC = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"], "additionalProperties": False}
CLOCK = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"$ref": "#/$defs/t", "$defs": {"t": UTC}}},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_follows_its_schema(client: Any, temperature: float) -> None:
    """`response_format` with a JSON schema: the answer, whole or streamed, validates, whatever the model would say."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "tags", "size"],
        "additionalProperties": False,
    }
    common = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Describe a bird."}],
        "temperature": temperature,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "bird", "schema": schema, "strict": True}},
    }
    whole = client.chat.completions.create(**common).choices[0]
    chunks = client.chat.completions.create(stream=True, **common)
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

    assert whole.finish_reason == "stop"
    jsonschema.validate(json.loads(whole.message.content), schema)
    assert streamed == whole.message.content


def test_constraints_of_vllm_hold(client: Any) -> None:
    """A choice, a regular expression and an object, in vLLM's spellings; a hostile schema is the sender's error."""

    def ask(**extra: Any) -> str:
        answer = client.completions.create(model="demo", prompt="Answer: ", max_tokens=40, seed=1, extra_body=extra)
        return str(answer.choices[0].text)

    assert ask(guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", ask(structured_outputs={"regex": "[0-9]{3}-[a-f]{2}"}))
    with pytest.raises(openai.BadRequestError) as hostile:
        ask(guided_json={"type": "no such type"})
    assert hostile.value.param == "guided_json"


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_parsed(client: Any, stream: bool) -> None:
    """`required` and a named function return tool calls whose arguments follow their schemas."""
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        common = {
            "model": "demo", "messages": ARITHMETIC, "tools": [CLOCK, WEATHER], "tool_choice": choice, "seed": 5,
            "parallel_tool_calls": False, "max_tokens": 120,
        }  # fmt: skip
        if stream:
            name, arguments, content, ends = "", "", "", []
            for chunk in client.chat.completions.create(stream=True, **common):
                for part in chunk.choices:
                    content += part.delta.content or ""
                    ends += [part.finish_reason] if part.finish_reason else []
                    for call in part.delta.tool_calls or ():
                        name += call.function.name or ""
                        arguments += call.function.arguments or ""
            assert (content, ends) == ("", ["tool_calls"])
        else:
            answer = client.chat.completions.create(**common).choices[0]
            (call,) = answer.message.tool_calls
            name, arguments = call.function.name, call.function.arguments
            assert call.id.startswith("call_")
            assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")

        functions: list[Any] = [tool["function"] for tool in (WEATHER, CLOCK)]
        schemas = {function["name"]: function["parameters"] for function in functions}
        jsonschema.validate(json.loads(arguments), schemas[name])
        assert choice == "required" or name == "get_weather"


def test_the_example_of_the_documentation_runs(demo: Served) -> None:
    """The example of a tool in docs/api.md prints what the page says."""
    (example,) = re.findall(r"```python\n(from openai.*?)```", Path("docs/api.md").read_text("utf-8"), re.DOTALL)
    program = example.replace("127.0.0.1:8000", demo.http)
    assert program != example

    environ = os.environ | {"NO_PROXY": "*"}
    ran = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True)

    assert ran.stdout.strip() == example.splitlines()[-1].removeprefix("# "), ran.stderr


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


@pytest.mark.parametrize("stream", [False, True])
def test_the_demo_model_calls_a_tool_and_uses_its_result(client: Any, stream: bool) -> None:
    """Left the choice, the model calls the tool that answers the question, and then tells the tool's result."""
    numbers = {"a": {"type": "integer"}, "b": {"type": "integer"}}
    tools = [
        _function("multiply", "Multiply two numbers.", numbers),
        _function("get_weather", "Get the weather in a city.", {"city": {"type": "string"}}),
    ]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    request = {"model": "demo", "messages": messages, "tools": tools, "temperature": 0}
    if stream:
        parts = [each.choices[0].delta for each in client.chat.completions.create(stream=True, **request)]
        calls = [call for part in parts for call in part.tool_calls or ()]
        assert not any(part.content for part in parts)
        name = "".join(call.function.name or "" for call in calls)
        arguments = "".join(call.function.arguments or "" for call in calls)
        call = {"id": calls[0].id, "type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    else:
        choice = client.chat.completions.create(**request).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.model_dump()["tool_calls"]
        messages.append(choice.message)
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Lisbon"}

    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
    answer = client.chat.completions.create(**request).choices[0]

    assert (answer.finish_reason, answer.message.content) == ("stop", "The weather in Lisbon is sunny.")
