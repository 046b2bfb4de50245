"""Calls constrained by a grammar, through every API: forced, named, strict, allowed, and truncated ones."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import jsonschema
import pytest

import quire
from measure.testbed.service import Served

Json = dict[str, Any]

QUESTION = "What is the weather in Lisbon?"
WEATHER = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 3}}, "required": ["city"]}
"""The model sees that the city is text; only grammars see its length limit."""
CLOCK = {
    "type": "object",
    "properties": {
        "utc": {"type": "boolean"},
        "zones": {"type": "array", "items": {"enum": ["sea", "land"]}, "maxItems": 2},
    },
    "required": ["utc"],
}
SCHEMAS = {"get_weather": WEATHER, "clock": CLOCK}
DESCRIPTIONS = {"get_weather": "Get the weather in a city.", "clock": "Get the time."}


@dataclass(frozen=True)
class Asked:
    """What a test asks for."""

    choice: str = "auto"
    """auto, required, or the name of a function."""
    strict: bool = False
    single: bool = True
    max_tokens: int = 96
    temperature: float = 0


@dataclass(frozen=True)
class Answer:
    """What an API answered."""

    calls: list[tuple[str, str]]
    """Names, and arguments as JSON."""
    text: str
    reached_limit: bool


def _functions(strict: bool) -> list[Json]:
    return [
        {"name": name, "description": DESCRIPTIONS[name], "parameters": schema, "strict": strict}
        for name, schema in SCHEMAS.items()
    ]


def _post(served: Served, path: str, body: Json) -> Json:
    answer = httpx.post(f"http://{served.http}{path}", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    found: Json = answer.json()
    return found


def _chat(served: Served, asked: Asked) -> Answer:
    named = {"type": "function", "function": {"name": asked.choice}}
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "temperature": asked.temperature,
        "tools": [{"type": "function", "function": each} for each in _functions(asked.strict)],
        "tool_choice": named if asked.choice in SCHEMAS else asked.choice,
        "parallel_tool_calls": not asked.single, "max_tokens": asked.max_tokens, "seed": 1,
    }  # fmt: skip
    (choice,) = _post(served, "/v1/chat/completions", body)["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    text = choice["message"]["content"] or ""
    return Answer([(each["name"], each["arguments"]) for each in calls], text, choice["finish_reason"] == "length")


def _responses(served: Served, asked: Asked) -> Answer:
    named = {"type": "function", "name": asked.choice}
    body = {
        "input": QUESTION, "tools": [{"type": "function", **each} for each in _functions(asked.strict)],
        "tool_choice": named if asked.choice in SCHEMAS else asked.choice, "temperature": asked.temperature,
        "parallel_tool_calls": not asked.single, "max_output_tokens": asked.max_tokens, "store": False,
    }  # fmt: skip
    answer = _post(served, "/v1/responses", body)
    calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    parts = [part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return Answer(calls, "".join(parts), answer["status"] == "incomplete")


def _messages(served: Served, asked: Asked) -> Answer:
    choices: Mapping[str, Json] = {"auto": {"type": "auto"}, "required": {"type": "any"}}
    tools = [
        {
            "name": each["name"],
            "description": each["description"],
            "input_schema": each["parameters"],
            "strict": each["strict"],
        }
        for each in _functions(asked.strict)
    ]
    choice = choices.get(asked.choice, {"type": "tool", "name": asked.choice})
    body = {
        "messages": [{"role": "user", "content": QUESTION}], "tools": tools, "max_tokens": asked.max_tokens,
        "tool_choice": choice | {"disable_parallel_tool_use": asked.single}, "temperature": asked.temperature,
    }  # fmt: skip
    answer = _post(served, "/v1/messages", body)
    calls = [(block["name"], json.dumps(block["input"])) for block in answer["content"] if block["type"] == "tool_use"]
    text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    return Answer(calls, text, answer["stop_reason"] == "max_tokens")


def _grpc(served: Served, asked: Asked) -> Answer:
    with quire.Client(served.grpc) as client:
        answer = client.generate(
            messages=[{"role": "user", "content": QUESTION}],
            tools=[{"type": "function", "function": each} for each in _functions(asked.strict)],
            tool_choice=asked.choice,
            parallel_tool_calls=not asked.single,
            max_tokens=asked.max_tokens,
            temperature=asked.temperature,
        ).result()
    calls = [(call.name, call.arguments) for call in answer.tool_calls]
    return Answer(calls, answer.text, answer.finished.reason == quire.FinishReason.LENGTH)


@pytest.fixture(params=[_chat, _responses, _messages, _grpc], ids=["chat", "responses", "messages", "grpc"])
def ask(request: pytest.FixtureRequest, demo: Served) -> Callable[[Asked], Answer]:
    """Return a function that asks the bundled model through one API."""
    return lambda asked: request.param(demo, asked)


def _check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_forced_call_is_valid(ask: Callable[[Asked], Answer], temperature: float) -> None:
    """A forced output is one call to a tool, or to the named tool, and follows the tool's schema."""
    forced = ask(Asked("required", temperature=temperature))
    named = ask(Asked("clock", temperature=temperature))

    assert (forced.text, len(forced.calls), forced.reached_limit) == ("", 1, False)
    assert (named.text, [name for name, _ in named.calls]) == ("", ["clock"])
    _check([*forced.calls, *named.calls])


def test_several_calls_may_be_made(ask: Callable[[Asked], Answer]) -> None:
    """Without the limit to one call, all calls that are complete follow their schemas."""
    answer = ask(Asked("required", single=False, temperature=1.5, max_tokens=400))

    assert (answer.text, bool(answer.calls)) == ("", True)
    _check(answer.calls[:-1] if answer.reached_limit else answer.calls)


def test_a_strict_call_follows_the_schema_where_the_model_decides(ask: Callable[[Asked], Answer]) -> None:
    """The model calls the tool either way; only a strict tool gets an argument that its schema permits."""
    (free,), (strict,) = ask(Asked()).calls, ask(Asked(strict=True)).calls

    assert (free[0], json.loads(free[1])) == ("get_weather", {"city": "Lisbon"})
    assert strict[0] == "get_weather"
    _check([strict])


def test_a_forced_call_that_is_cut_off_is_there_so_far(ask: Callable[[Asked], Answer]) -> None:
    """At max_tokens, the answer contains the incomplete call, and its finish reason is the limit."""
    answer = ask(Asked("get_weather", max_tokens=20))

    assert answer.reached_limit
    assert [name for name, _ in answer.calls] == ["get_weather"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(("mode", "allowed"), [("auto", ["get_weather"]), ("required", ["clock"])])
def test_only_allowed_tools_are_called(demo: Served, path: str, mode: str, allowed: list[str]) -> None:
    """The model sees all tools, and calls an allowed one."""
    if path == "/v1/responses":
        tools = [{"type": "function", **each} for each in _functions(False)]
        named = [{"type": "function", "name": name} for name in allowed]
        choice: Json = {"type": "allowed_tools", "mode": mode, "tools": named}
        answer = _post(demo, path, {"input": QUESTION, "tools": tools, "tool_choice": choice, "temperature": 0})
        calls = [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    else:
        tools = [{"type": "function", "function": each} for each in _functions(False)]
        functions = [{"type": "function", "function": {"name": name}} for name in allowed]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
        messages = [{"role": "user", "content": QUESTION}]
        body = {"messages": messages, "tools": tools, "tool_choice": choice, "temperature": 0}
        (first,) = _post(demo, path, body)["choices"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in first["message"]["tool_calls"]]

    assert [name for name, _ in calls] == allowed
    _check(calls)
