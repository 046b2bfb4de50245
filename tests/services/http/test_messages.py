"""Tests for Anthropic's Messages API: conversion of content blocks to a chat, and of outputs to content blocks."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import generation_pb2 as v1
from services.http.bodies import checked, parse
from services.http.messages.answer import MessagesAnswer
from services.http.messages.conversion import to_chat
from services.http.messages.schema import MessagesBody
from services.http.output import ChatOutput
from services.http.schema import ChatBody
from shared.errors import InvalidRequestError
from tests.services.parsed import deltas
from tests.services.stack import MODEL, running_stack

OUTPUT = '<think>hm</think>\nOne moment.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> MessagesBody:
    """Return a parsed body."""
    return parse(MessagesBody, json.dumps({"model": "m", "max_tokens": 9, "messages": [USER]} | fields).encode())


def answered(text: str, end: v1.Finished, cut: int = 7) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events and the message for an output that arrives in two deltas."""
    output = ChatOutput(lambda _: b"x")
    output.prompt_tokens = 5
    answer = MessagesAnswer("msg_1", "m", output)
    events: list[dict[str, Any]] = []
    for response in deltas((text[:cut], text[cut:]), [1, 2]):
        events += answer.events(0, response)
    events += answer.events(0, v1.GenerateResponse(finished=end))
    return events, answer.message()


def test_an_output_becomes_blocks() -> None:
    """Thinking, text and tool uses are blocks; their events come in Anthropic's order."""
    usage = v1.Usage(completion_tokens=4, cached_prompt_tokens=2)
    events, message = answered(OUTPUT, v1.Finished(reason=v1.FINISH_REASON_STOP, usage=usage))

    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "One moment."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 4,
    }  # fmt: skip
    names = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [name for index, name in enumerate(names) if not index or names[index - 1] != name] == [
        "message_start", *block, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("partial_json", "") for delta in deltas) == '{"a": 1}'


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (v1.Finished(reason=v1.FINISH_REASON_STOP), "end_turn", None),
        (v1.Finished(reason=v1.FINISH_REASON_STOP, stop_string="END"), "stop_sequence", "END"),
        (v1.Finished(reason=v1.FINISH_REASON_LENGTH), "max_tokens", None),
    ],
)
def test_a_message_says_why_it_stopped(end: v1.Finished, reason: str, sequence: str | None) -> None:
    """The reason is one of Anthropic's."""
    events, message = answered("Hello there.", end)

    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    assert events[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize("arguments", ['{"a": ', '{"a": NaN}', '{"a": 1e999}', '{"a": ' + "[" * 5000])
def test_arguments_that_are_no_json_are_shown_as_text(arguments: str) -> None:
    """A truncated tool use, or one whose arguments are not JSON, has the existing text."""
    end = v1.Finished(reason=v1.FINISH_REASON_LENGTH)
    _, message = answered('<tool_call>\n{"name": "f", "arguments": ' + arguments, end)

    assert message["content"][0]["input"]["incomplete"].startswith(arguments)
    assert message["stop_reason"] == "max_tokens"


def test_blocks_become_turns() -> None:
    """Tool results are separate turns, before accompanying text; thinking is omitted."""
    blocks = [
        {"type": "thinking", "thinking": "x", "signature": "y"},
        {"type": "text", "text": "ok"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}], "is_error": False},
        {"type": "text", "text": "thanks", "cache_control": {"type": "ephemeral"}},
    ]
    request = body(
        messages=[USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}],
        system=[{"type": "text", "text": "Rules."}], stop_sequences=["END"], top_k=5, thinking={"type": "disabled"},
        tools=[{"name": "f", "input_schema": {"type": "object"}, "strict": True}], context_management={"edits": []},
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip

    chat = checked(ChatBody, to_chat(request).body)

    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "Rules."), ("user", "hi"), ("assistant", "ok"), ("tool", "7"), ("user", "thanks"),
    ]  # fmt: skip
    (call,) = chat.messages[2].tool_calls or []
    assert (call.id, call.function.name, call.function.arguments) == ("t1", "f", '{"a": 1}')
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    assert [tool.function.strict for tool in chat.tools or ()] == [True]
    assert (chat.max_tokens, chat.stop, chat.top_k) == (9, ["END"], 5)
    assert chat.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("place", ["request", "system", "tool", "message", "tool result", "none"])
def test_the_longest_lifetime_of_a_breakpoint_is_the_retention(place: str) -> None:
    """A `ttl` in `cache_control` anywhere in the request retains its KV; the longest counts; without one, none does."""

    def marked(block: dict[str, Any], here: str, ttl: str = "1h") -> dict[str, Any]:
        return block | ({"cache_control": {"type": "ephemeral", "ttl": ttl}} if place == here else {})

    text = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [marked(text, "tool result")]}
    first = marked({"type": "text", "text": "y"}, "message", "5m")
    request = body(
        messages=[{"role": "user", "content": [first, marked(text, "message"), result]}],
        system=[marked(text, "system")],
        tools=[marked({"name": "f", "input_schema": {"type": "object"}}, "tool")],
        **marked({}, "request"),
    )

    assert to_chat(request).body["retention_s"] == (None if place == "none" else 3600)
    assert to_chat(request.model_copy(update={"retention_s": 7.0})).body["retention_s"] == 7


def test_an_unknown_lifetime_is_refused() -> None:
    """Only the lifetimes of Anthropic's API are known; the message names the field."""
    with pytest.raises(InvalidRequestError, match=r"cache_control\.ttl"):
        body(messages=[USER], cache_control={"type": "ephemeral", "ttl": "2h"})


def test_an_unknown_kind_of_breakpoint_is_refused() -> None:
    """Only `ephemeral` breakpoints exist; the message names the field."""
    with pytest.raises(InvalidRequestError, match=r"cache_control\.type"):
        body(messages=[USER], cache_control={"type": "permanent"})


def test_what_claude_code_sends_is_understood() -> None:
    """Its billing block, whose hash differs between requests, is not part of the prompt; server tools are omitted."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0f3a;"},
        {"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}},
    ]
    name = "mcp__" + "x" * 120
    request = body(
        system=system, thinking={"type": "adaptive"}, context_management={"edits": []}, metadata={"user_id": "u"},
        tools=[{"name": name, "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "search"}],
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip

    chat = checked(ChatBody, to_chat(request).body)

    assert [(message.role, message.content) for message in chat.messages] == [("system", "Rules."), ("user", "hi")]
    assert [tool.function.name for tool in chat.tools or ()] == [name]
    assert chat.reasoning_effort == "high"
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == {"type": "object"}


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "bash_20250124", "name": "bash"}, "tools[0].type: 'bash_20250124' is not supported"),
        ({"input_schema": {}}, "tools[0].name: missing"),
    ],
)
def test_a_tool_that_cannot_be_shown_is_refused(tool: dict[str, Any], message: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequestError) as error:
        to_chat(body(tools=[tool]))

    assert error.value.message.startswith(message)


def test_media_are_refused() -> None:
    """The error names the block."""
    with pytest.raises(InvalidRequestError) as error:
        to_chat(body(messages=[{"role": "user", "content": [{"type": "image", "source": {}}]}]))

    assert error.value.message.startswith("messages[0].content[0].type: blocks of type 'image' are not supported")


def test_messages_are_served_with_anthropic_s_errors(tmp_path: Path) -> None:
    """A key in x-api-key is accepted, streams have named events, and errors have Anthropic's form."""
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    request = {"model": "echo", "max_tokens": 8, "messages": [{"role": "user", "content": "the fox"}]}

    async def main() -> None:
        async with running_stack(tmp_path, api_key_file=str(keys)) as stack:
            stack.http.headers["x-api-key"] = "secret"
            whole = await stack.http.post("/v1/messages", json=request)
            stream = await stack.http.post("/v1/messages", json=request | {"stream": True})
            counted = await stack.http.post("/v1/messages/count_tokens", json=request)
            missing = await stack.http.post("/v1/messages", json=request | {"model": "other"})
            short = await stack.http.post("/messages", json=request)
            much = await stack.http.post("/v1/messages", json=request | {"max_tokens": 64_000})
            stack.http.headers["x-api-key"] = "wrong"
            refused = await stack.http.post("/v1/messages", json=request)

            message = whole.json()
            assert message["stop_reason"] == "max_tokens"
            assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}
            lines = stream.text.splitlines()
            assert lines[0] == "event: message_start"
            assert lines[-3:-1] == ["event: message_stop", 'data: {"type":"message_stop"}']
            usage = much.json()["usage"]
            assert usage["input_tokens"] + usage["output_tokens"] == MODEL.max_model_len
            assert short.json()["error"]["message"].startswith("/messages: not found; use /v1/messages")
            assert short.json()["error"]["type"] == "not_found_error"
            assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            for answer in (missing, short, refused):
                assert answer.json()["request_id"] == answer.headers["request-id"]
            assert whole.headers["request-id"] == whole.headers["x-request-id"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].type: blocks of type 'image' are not supported"),
        ({"tools": [{"type": "web_search_20250305"}, {"name": "a b", "input_schema": {}}]},
         "tools[1].name: must match"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: not supported; call the servers' tools from the client"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
        ({"stop_sequence": ["x"]}, "stop_sequence: unknown field; did you mean 'stop_sequences'?"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences[0]: "),
    ],
)  # fmt: skip
def test_errors_name_what_the_client_wrote(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """The path of a field in an error is its path in the client's request."""
    request = {"max_tokens": 8, "messages": [{"role": "user", "content": "the fox"}], **fields}

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            answer = await stack.http.post("/v1/messages", json=request)

            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)

    asyncio.run(main())


def test_options_of_the_scheduler_are_those_of_chat(tmp_path: Path) -> None:
    """Tenant, priority, cache salt and the request's id from the header reach the scheduler."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = {"max_tokens": 8, "messages": [USER], "tenant": "t", "priority": -3, "cache_salt": "s"}
            answer = await stack.http.post("/v1/messages", json=request, headers={"x-request-id": "mine"})
            other = await stack.http.post("/v1/messages", json={**request, "cache_salt": "other"})

            submitted, salted = stack.core.submissions[-2:]
            assert answer.status_code == other.status_code == 200
            assert (submitted.tenant, submitted.priority, submitted.request_id) == ("t", 3, "mine")
            assert submitted.cache_scope != salted.cache_scope
            assert answer.headers["x-request-id"] == answer.headers["request-id"] == "mine"

    asyncio.run(main())


def test_models_have_the_fields_of_anthropic_s_clients(tmp_path: Path) -> None:
    """A model in /v1/models has a type, a display name and its creation time."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            (model,) = (await stack.http.get("/v1/models")).json()["data"]

            assert (model["type"], model["display_name"]) == ("model", MODEL.name)
            assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]

    asyncio.run(main())


def test_a_message_has_at_least_one_token() -> None:
    """The refusal names no field that this API lacks."""
    with pytest.raises(InvalidRequestError, match="max_tokens: must be") as refused:
        body(max_tokens=0)
    assert "echo" not in refused.value.message
