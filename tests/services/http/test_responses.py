"""OpenAI's Responses API: items become a chat, an output becomes items, and responses can be continued."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.v1 import generation_pb2 as v1
from services.http.bodies import checked, parse
from services.http.output import ChatOutput
from services.http.responses.answer import ResponsesAnswer
from services.http.responses.conversion import to_chat
from services.http.responses.schema import ResponsesBody
from services.http.responses.store import ResponseStore, StoredResponse
from services.http.schema import AllowedToolsChoice, ChatBody, NamedTool
from shared.errors import InvalidRequestError
from tests.services.parsed import deltas
from tests.services.stack import running_stack

OUTPUT = '<think>hm</think>\nOne moment.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}


def body(**fields: Any) -> ResponsesBody:
    """Return a parsed body."""
    return parse(ResponsesBody, json.dumps({"model": "m", "input": "hi"} | fields).encode())


def test_a_cache_retention_works_as_in_chat() -> None:
    """`prompt_cache_retention` is passed on, and its values are checked."""
    assert to_chat(body(prompt_cache_retention="24h"), []).body["prompt_cache_retention"] == "24h"
    with pytest.raises(InvalidRequestError, match="prompt_cache_retention"):
        body(prompt_cache_retention="1h")


def answered(
    text: str, reason: v1.FinishReason.ValueType, cut: int = 7, **fields: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events and the response for an output that arrives in two deltas."""
    output = ChatOutput(lambda _: b"x")
    output.prompt_tokens = 5
    answer = ResponsesAnswer(body(**fields), "resp_1", "m", output)
    events: list[dict[str, Any]] = []
    for message in deltas((text[:cut], text[cut:]), [1, 2]):
        events += answer.events(0, message)
    usage = v1.Usage(completion_tokens=4, cached_prompt_tokens=2)
    events += answer.events(0, v1.GenerateResponse(finished=v1.Finished(reason=reason, usage=usage)))
    return events, answer.response()


def test_an_output_becomes_items() -> None:
    """Reasoning, text and calls are items; their events come in OpenAI's order and add up to the response."""
    events, response = answered(OUTPUT, v1.FINISH_REASON_STOP)

    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "One moment."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert {item["status"] for item in response["output"]} == {"completed"}
    assert response["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 9,
    }
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for index, name in enumerate(names) if not index or names[index - 1] != name] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] == response
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]


def test_a_client_that_requests_a_summary_reads_the_reasoning_there() -> None:
    """Events and item have OpenAI's summary format; the summary's text is the whole reasoning."""
    events, response = answered(OUTPUT, v1.FINISH_REASON_STOP, reasoning={"summary": "auto"})

    reasoning = response["output"][0]
    assert reasoning["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in reasoning
    assert response["reasoning"] == {"effort": None, "summary": "auto"}
    parts = [event for event in events if "summary_index" in event]
    assert [event["type"].removeprefix("response.reasoning_summary_") for event in parts] == [
        "part.added", "text.delta", "text.done", "part.done",
    ]  # fmt: skip
    assert parts[1]["delta"] == parts[2]["text"] == parts[3]["part"]["text"] == "hm"


def test_usage_does_not_depend_on_the_cut_of_the_output() -> None:
    """The same output has the same usage, also when reasoning and text arrive in one message."""
    usages = [answered(OUTPUT, v1.FINISH_REASON_STOP, cut)[1]["usage"] for cut in range(len(OUTPUT))]

    assert all(usage == usages[0] for usage in usages)


def test_an_output_that_reaches_its_limit_is_incomplete() -> None:
    """The last event, the response and its last item say so."""
    events, response = answered("Half a sent", v1.FINISH_REASON_LENGTH)

    assert (events[-1]["type"], response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_items_become_turns() -> None:
    """Instructions come first, parts are joined, one turn's calls are one message, reasoning is omitted."""
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]  # fmt: skip
    request = body(
        input=items, instructions="Rules.", tools=[FUNCTION, {"type": "web_search"}], max_output_tokens=9,
        reasoning={"effort": "low", "summary": "auto"}, include=["reasoning.encrypted_content"], truncation="auto",
        tool_choice={"type": "function", "name": "f"}, client_metadata={"x": 1},
    )  # fmt: skip

    chat = checked(ChatBody, to_chat(request, [{"role": "user", "content": "earlier"}]).body)

    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "Rules."), ("user", "earlier"), ("developer", "Be short."), ("user", "ab"), ("assistant", "ok"),
        ("tool", "1"), ("tool", "2"),
    ]  # fmt: skip
    assert [call.id for call in chat.messages[4].tool_calls or ()] == ["c1", "c2"]
    assert [tool.function.name for tool in chat.tools or ()] == ["f"]
    assert (chat.max_completion_tokens, chat.reasoning_effort) == (9, "low")


PATCH = {
    "type": "custom", "name": "patch", "description": "Edits a file.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}  # fmt: skip
TEAM = {"type": "namespace", "name": "team", "description": "d", "tools": [FUNCTION | {"name": "ask"}]}


def test_custom_tools_and_namespaces_are_functions_of_the_chat() -> None:
    """A chat has only functions; history and tool_choice name them in the same way."""
    items = [
        {"role": "user", "content": "go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "namespace": "team", "name": "ask", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "yes"},
        {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": {"type": "exec"}},
        {"type": "local_shell_call_output", "id": "c3", "output": "ok"},
        {"type": "web_search_call", "id": "w", "action": {"type": "search"}},
    ]
    choice = {"type": "function", "name": "ask", "namespace": "team"}

    chat = checked(
        ChatBody, to_chat(body(input=items, tools=[PATCH, TEAM, {"type": "web_search"}], tool_choice=choice), []).body
    )

    patch, ask = [tool.function for tool in chat.tools or ()]
    assert patch.description == "Edits a file.\n\nThe input follows this grammar (lark):\nstart: /.+/"
    assert patch.parameters is not None
    assert patch.parameters["required"] == ["input"]
    assert ask.name == "team__ask"
    calls = [call for message in chat.messages for call in message.tool_calls or ()]
    assert [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("c1", "patch", {"input": 'a "b"'}), ("c2", "team__ask", {}), ("c3", "local_shell", {"type": "exec"}),
    ]  # fmt: skip
    assert [message.tool_call_id for message in chat.messages if message.role == "tool"] == ["c1", "c2", "c3"]
    assert isinstance(chat.tool_choice, NamedTool)
    assert chat.tool_choice.function.name == "team__ask"


def test_allowed_tools_and_strict_reach_the_chat() -> None:
    """The choice names chat functions; a function is strict if the client requests it."""
    tools = [FUNCTION | {"strict": True}, TEAM, PATCH]
    named = [{"type": "function", "name": "ask", "namespace": "team"}, {"type": "custom", "name": "patch"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": named}

    chat = checked(ChatBody, to_chat(body(tools=tools, tool_choice=choice), []).body)

    assert isinstance(chat.tool_choice, AllowedToolsChoice)
    assert chat.tool_choice.allowed_tools.mode == "required"
    assert [tool.function.name for tool in chat.tool_choice.allowed_tools.tools] == ["team__ask", "patch"]
    assert [tool.function.strict for tool in chat.tools or ()] == [True, True, None]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** \\u00e9\\n"}', "*** é\n"),
        ('{"input": "cut o', "cut o"),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"patch": 1}', '{"patch": 1}'),
        ("", ""),
    ],
)
def test_a_call_of_a_custom_tool_has_text(arguments: str, text: str) -> None:
    """The client gets the only argument's text, even if truncated; other arguments are shown unchanged."""
    output = '<tool_call>\n{"name": "patch", "arguments": ' + arguments
    events, response = answered(output, v1.FINISH_REASON_LENGTH, tools=[PATCH])

    (item,) = response["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "patch", text)
    assert [event["type"].removeprefix("response.") for event in events[2:]] == [
        "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done",
        "incomplete",
    ]  # fmt: skip
    assert events[4]["input"] == text
    assert response["tools"] == [PATCH]


def test_a_call_of_a_tool_in_a_namespace_names_both() -> None:
    """The name is the client's, without the namespace."""
    output = '<tool_call>\n{"name": "team__ask", "arguments": {}}\n</tool_call>'
    _, response = answered(output, v1.FINISH_REASON_STOP, tools=[TEAM])

    (item,) = response["output"]
    assert (item["type"], item["namespace"], item["name"], item["arguments"]) == ("function_call", "team", "ask", "{}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [{"type": "compaction", "id": "x"}]}, "input[0].type: items of type 'compaction' are not"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type: parts",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content: missing"),
        ({"tools": [FUNCTION, {"type": "local_shell"}]}, "tools[1].type: 'local_shell' is not supported"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema: missing"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], message: str) -> None:
    """The error names the field and the remedy."""
    with pytest.raises(InvalidRequestError) as error:
        to_chat(body(**fields), [])

    assert error.value.message.startswith(message)


def stored(number: int, size: int) -> StoredResponse:
    """Return a response to store."""
    return StoredResponse({"id": f"resp_{number}"}, [{"role": "user", "content": "x" * size}], 1)


def test_the_store_is_bounded_and_private() -> None:
    """The oldest responses are dropped first, and another principal does not see a response."""
    store = ResponseStore(400)
    for number in range(9):
        store.put("alice", stored(number, 50))

    assert store.get("alice", "resp_0") is None
    assert store.get("alice", "resp_8") == stored(8, 50)
    assert store.get("bob", "resp_8") is None
    assert not store.drop("bob", "resp_8")
    assert store.drop("alice", "resp_8")
    assert store.get("alice", "resp_8") is None


def test_output_items_are_stored_once() -> None:
    """A response whose output takes most of the store fits, and comes back with its items in their order."""
    items = [{"id": f"item_{number}", "type": "message", "text": "x" * 400} for number in range(2)]
    response = StoredResponse({"id": "resp_1", "output": items, "status": "completed"}, [], 0)
    store = ResponseStore(1200)
    store.put("alice", response)

    assert store.get("alice", "resp_1") == response
    assert list(response.response) == list(store.get("alice", "resp_1").response)  # type: ignore[union-attr]
    assert store.item("alice", "item_1") == items[1]
    assert store.drop("alice", "resp_1")
    assert store.item("alice", "item_1") is None


def test_a_principal_evicts_its_own_responses() -> None:
    """Whatever one principal stores, others keep their responses as long as they hold less."""
    store = ResponseStore(10_000)
    for name in ("alice", "bob"):
        store.put(name, stored(0, 1000))
    for number in range(300):
        store.put("mallory", stored(number % 100, 400 + number))
        store.drop("mallory", f"resp_{number % 7}")
    store.put("bob", stored(1, 3000))

    assert store.get("alice", "resp_0") is not None
    assert store.get("bob", "resp_0") is not None
    assert store.get("bob", "resp_1") is not None
    assert sum(store.get("mallory", f"resp_{number}") is not None for number in range(100)) > 3


def test_a_response_can_be_continued_returned_and_deleted(tmp_path: Path) -> None:
    """The next response continues a stored one in its session; a response that is not stored is not found."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = {"input": "the fox", "max_output_tokens": 8}
            first = (await stack.http.post("/v1/responses", json=request)).json()
            path = f"/v1/responses/{first['id']}"
            second = (
                await stack.http.post("/v1/responses", json=request | {"previous_response_id": first["id"]})
            ).json()
            kept = await stack.http.get(path)
            deleted = await stack.http.delete(path)
            missing = await stack.http.post("/v1/responses", json=request | {"previous_response_id": first["id"]})
            private = (await stack.http.post("/v1/responses", json=request | {"store": False})).json()
            unknown = await stack.http.get(f"/v1/responses/{private['id']}")

            sessions = [submission.session for submission in stack.core.submissions]
            assert sessions[0] == sessions[1] != sessions[-1]
            assert first["status"] == "incomplete"
            assert kept.json() == first
            assert second["usage"]["input_tokens"] > 2 * first["usage"]["input_tokens"]
            assert deleted.json()["deleted"]
            assert (missing.status_code, unknown.status_code) == (400, 404)
            error = missing.json()["error"]
            assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")

    asyncio.run(main())


def test_log_probabilities_of_the_text(tmp_path: Path) -> None:
    """`include` or `top_logprobs` requests them; those of all deltas together equal those of the part."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = {"input": "the fox", "max_output_tokens": 8, "temperature": 0, "top_logprobs": 2}
            whole = (await stack.http.post("/v1/responses", json=request)).json()
            stream = (await stack.http.post("/v1/responses", json=request | {"stream": True})).text
            included = {"include": ["message.output_text.logprobs"], "top_logprobs": None}
            chosen = (await stack.http.post("/v1/responses", json=request | included)).json()
            none = (await stack.http.post("/v1/responses", json=request | {"top_logprobs": None})).json()

            part = whole["output"][0]["content"][0]
            assert len(part["logprobs"]) == 8
            assert "".join(each["token"] for each in part["logprobs"]).endswith(part["text"])
            assert all(each["logprob"] <= 0 for each in part["logprobs"])
            events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
            deltas = [event for event in events if event["type"] == "response.output_text.delta"]
            assert [each for event in deltas for each in event["logprobs"]] == part["logprobs"]
            assert len(chosen["output"][0]["content"][0]["logprobs"]) == 8
            assert none["output"][0]["content"][0]["logprobs"] == []

    asyncio.run(main())


def test_the_tokens_of_an_input_are_counted(tmp_path: Path) -> None:
    """The count equals the usage, even when a response is continued; nothing is generated."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = {"input": "the fox", "instructions": "Be brief.", "max_output_tokens": 8}
            first = (await stack.http.post("/v1/responses", json=request)).json()
            counted = (await stack.http.post("/v1/responses/input_tokens", json=request)).json()
            further = request | {"previous_response_id": first["id"]}
            second = (await stack.http.post("/v1/responses", json=further)).json()
            recounted = (await stack.http.post("/v1/responses/input_tokens", json=further)).json()

            assert counted == {"object": "response.input_tokens", "input_tokens": first["usage"]["input_tokens"]}
            assert recounted["input_tokens"] == second["usage"]["input_tokens"] > counted["input_tokens"]

    asyncio.run(main())


def test_items_of_stored_responses_can_be_referred_to(tmp_path: Path) -> None:
    """A reference, as sent by the AI SDK, stands for the item; a deleted or foreign reference is named."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            question = {"role": "user", "content": "the fox"}
            first = (await stack.http.post("/v1/responses", json={"input": [question], "max_output_tokens": 8})).json()
            (item,) = first["output"]
            whole = {"input": [question, item, question], "max_output_tokens": 8}
            referring = whole | {"input": [question, {"type": "item_reference", "id": item["id"]}, question]}
            answers = [(await stack.http.post("/v1/responses", json=each)).json() for each in (whole, referring)]
            await stack.http.delete(f"/v1/responses/{first['id']}")
            missing = await stack.http.post("/v1/responses", json=referring)

            assert answers[0]["usage"] == answers[1]["usage"]
            assert answers[0]["usage"]["input_tokens"] > 2 * first["usage"]["input_tokens"]
            assert (missing.status_code, missing.json()["error"]["param"]) == (400, "input[1].id")

    asyncio.run(main())


def test_many_references_to_an_item_read_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the whole response for each of thousands of references would block the process for minutes."""
    read: list[str] = []

    def loads(text: str) -> Any:
        read.append(text)
        return json.loads(text)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            large = {"input": "hi", "max_output_tokens": 8, "user": "x" * 100_000}
            (item,) = (await stack.http.post("/v1/responses", json=large)).json()["output"]
            monkeypatch.setattr("services.http.responses.store.json", SimpleNamespace(loads=loads, dumps=json.dumps))
            references = [{"type": "item_reference", "id": item["id"]}] * 1000
            answer = await stack.http.post("/v1/responses/input_tokens", json={"input": references})

            assert answer.json()["input_tokens"] > 1000
            assert [len(text) < 10_000 for text in read] == [True]

    asyncio.run(main())


def test_references_stand_for_at_most_the_bytes_of_a_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a short body with thousands of references to a large item would fill the memory."""
    monkeypatch.setattr("services.http.responses.endpoint.MAX_BODY_BYTES", 2000)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            (item,) = (await stack.http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 8})).json()[
                "output"
            ]
            reference = {"type": "item_reference", "id": item["id"]}
            answers = [
                await stack.http.post("/v1/responses/input_tokens", json={"input": [reference] * count})
                for count in (2, 100)
            ]

            assert [answer.status_code for answer in answers] == [200, 400]
            error = answers[1].json()["error"]
            assert "have more than 2000 bytes; refer to fewer items" in error["message"]
            assert error["param"].startswith("input[")

    asyncio.run(main())


def test_without_a_store_nothing_is_continued(tmp_path: Path) -> None:
    """With response_store_bytes 0, previous_response_id is refused with the remedy."""

    async def main() -> None:
        async with running_stack(tmp_path, response_store_bytes=0) as stack:
            request = {"input": "the fox", "previous_response_id": "resp_1"}
            refused = await stack.http.post("/v1/responses", json=request)

            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "previous_response_id"

    asyncio.run(main())


def test_a_stored_response_is_streamed_again(tmp_path: Path) -> None:
    """Its events have the types and the order of the first stream, and may begin after one that the client has."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = {"input": "the fox", "max_output_tokens": 8, "stream": True}
            first = events_in((await stack.http.post("/v1/responses", json=request)).text)
            path = f"/v1/responses/{first[-1]['response']['id']}"
            again = events_in((await stack.http.get(path, params={"stream": "true"})).text)
            rest = events_in((await stack.http.get(path, params={"stream": "true", "starting_after": 3})).text)
            wrong = await stack.http.get(path, params={"stream": "true", "starting_after": "x"})

            assert again[-1]["response"] == first[-1]["response"]
            types = [event["type"] for event in first]
            assert [event["type"] for event in again] == sorted(set(types), key=types.index)
            assert [event["sequence_number"] for event in again] == list(range(len(again)))
            assert rest == again[4:]
            assert wrong.json()["error"]["message"] == "starting_after: must be an integer from 0 to 2147483648"

    asyncio.run(main())


def events_in(stream: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]


def test_the_input_of_a_stored_response_is_listed(tmp_path: Path) -> None:
    """All turns before the response are listed page by page, the newest first unless asked otherwise."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
            output = {"type": "function_call_output", "call_id": "c", "output": "7"}
            turns = [{"role": "user", "content": "the fox"}, call, output]
            request = {"input": turns, "instructions": "be brief", "max_output_tokens": 8}
            response = (await stack.http.post("/v1/responses", json=request)).json()
            path = f"/v1/responses/{response['id']}/input_items"
            oldest = (await stack.http.get(path, params={"order": "asc", "limit": 2})).json()
            last = (await stack.http.get(path, params={"order": "asc", "after": oldest["last_id"]})).json()
            newest = (await stack.http.get(path)).json()
            cancelled = await stack.http.post(f"/v1/responses/{response['id']}/cancel")

            assert [item["type"] for item in oldest["data"]] == ["message", "function_call"]
            assert oldest["has_more"]
            assert [item["output"] for item in last["data"]] == ["7"]
            assert not last["has_more"]
            assert newest["data"] == [*last["data"], *oldest["data"][::-1]]
            assert cancelled.status_code == 400
            assert "close its connection" in cancelled.json()["error"]["message"]

    asyncio.run(main())


def test_options_of_the_scheduler_are_those_of_chat(tmp_path: Path) -> None:
    """Tenant, priority, cache salt and the request's id from the header reach the scheduler."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = {"input": "the fox", "max_output_tokens": 8, "tenant": "t", "priority": -3, "cache_salt": "s"}
            answer = await stack.http.post("/v1/responses", json=request, headers={"x-request-id": "mine"})

            submitted = stack.core.submissions[-1]
            assert (submitted.tenant, submitted.priority) == ("t", 3)
            assert answer.headers["x-request-id"] == "mine"
            assert answer.json()["id"] == "resp_mine"

    asyncio.run(main())


def test_sampling_options_are_those_of_chat() -> None:
    """The sampling options and ends of output that vLLM adds reach the chat under the same names."""
    options = {"stop": ["x"], "ignore_eos": True, "seed": 7, "top_k": 3, "min_p": 0.5, "temperature": 0.0}
    chat = to_chat(body(**options), []).body

    assert {name: chat[name] for name in options} == options


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conversation": "conv_1"}, "conversation: not supported; use previous_response_id"),
        ({"prompt": {"id": "p"}}, "prompt: not supported; prompt templates are not stored"),
        ({"background": True}, "background: must be false"),
        ({"instruction": "x"}, "instruction: unknown field; did you mean 'instructions'?"),
        ({"tool_choice": "required"}, "tool_choice: requires tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}, FUNCTION | {"name": "a b"}]}, "tools[1].name: must match"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """An option that changes the meaning of a request is never ignored."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            answer = await stack.http.post("/v1/responses", json={"input": "the fox", **fields})

            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(message)

    asyncio.run(main())
