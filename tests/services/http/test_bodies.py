"""HTTP request bodies: fields are checked, and errors use the senders' names."""

import json
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from quire.v1 import generation_pb2 as v1
from services.http.bodies import parse
from services.http.errors import with_http_names
from services.http.prompts import prepare_chat, prepare_completion, prompts_of
from services.http.schema import ChatBody, CompletionBody
from services.parsers import Function, model_format
from services.requests.tools import Tools, make_grammar, read_tools
from services.text.chat import template_input
from shared.errors import InvalidRequestError

MESSAGES = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time"}}
FUNCTIONS = (Function("time", {}), Function("weather", WEATHER["function"]["parameters"]))


def chat(parser: str = "hermes", **fields: Any) -> v1.GenerateRequest:
    """The request that a conversation with these fields becomes."""
    body = parse(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())
    prepared = prepare_chat(body, "id", strict_order=False)
    try:
        read_tools(prepared.request, model_format(parser, "{{ tools }}", {}))
    except InvalidRequestError as error:
        raise with_http_names(error, prepared.names) from None
    return prepared.request


def completion(**fields: Any) -> v1.GenerateRequest:
    """The request that a completion with these fields becomes."""
    body = parse(CompletionBody, json.dumps({"prompt": "hello", **fields}).encode())
    (prompt,) = prompts_of(body.prompt)
    return prepare_completion(body, prompt, "id").request


def test_every_option_reaches_the_request() -> None:
    """OpenAI's and vLLM's options arrive in the fields of the public proto that mean the same."""
    request = completion(
        model="m", max_tokens=7, temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125, typical_p=0.75, seed=-1, n=3,
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"5": -100, "7": 1.5},
        allowed_token_ids=[1, 2], banned_token_ids=[3], bad_words=["bad"], stop=["a", "b"], stop_token_ids=[9],
        include_stop_str_in_output=True, ignore_eos=True, min_tokens=2, skip_special_tokens=False, logprobs=4,
        prompt_logprobs=2, echo=True, truncate_prompt_tokens=10, priority=5, cache_salt="s", tenant="t",
        request_class="c", expected_output_tokens=6, ttft_target_s=0.5, total_time_target_s=2, user="ignored",
        session_id="a", ends_session=True, retention_s=60, retention_priority=4, expected_pause_s=1.5,
    )  # fmt: skip
    expected = v1.GenerateRequest(
        request_id="id",
        model="m",
        text="hello",
        sampling=v1.SamplingOptions(
            temperature=0.5, top_p=0.25, top_k=0, min_p=0.125, typical_p=0.75, seed=2**64 - 1, n=3,
            repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={5: -100, 7: 1.5},
            allowed_token_ids=[1, 2], banned_token_ids=[3], bad_words=["bad"],
        ),
        stop=v1.StopOptions(
            max_tokens=7, stop_strings=["a", "b"], stop_token_ids=[9], include_stop_string=True, ignore_eos=True,
            min_tokens=2,
        ),
        output=v1.OutputOptions(
            include_special_tokens=True, logprobs=4, prompt_logprobs=2, echo=True, truncate_prompt_tokens=10
        ),
        scheduling=v1.SchedulingOptions(
            priority=-5, cache_scope="s", tenant="t", request_class="c", expected_output_tokens=6, session_id="a",
            ends_session=True, retention_priority=4,
        ),
    )  # fmt: skip
    expected.scheduling.ttft_target.FromMilliseconds(500)
    expected.scheduling.total_time_target.FromSeconds(2)
    expected.scheduling.retention.FromSeconds(60)
    expected.scheduling.expected_pause.FromMilliseconds(1500)

    assert request == expected


@pytest.mark.parametrize(
    "additions",
    [
        {"tool_calls": [{"index": 0}], "parsed": None, "audio": None, "function_call": None},
        {"tool_calls": [{"index": 0, "function": {"parsed_arguments": {"city": "Rome"}}}], "parsed": None},
        {"id": "msg_1", "timestamp": 5, "cache_control": {"type": "ephemeral"}, "thinking_blocks": []},
    ],
)
def test_what_clients_add_to_messages_is_ignored(additions: dict[str, Any]) -> None:
    """Messages from stream(), deltas and parse() of OpenAI's client, and from UIs, keep their meaning."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (extra,) = additions.get("tool_calls", [{}])
    function = call["function"] | extra.get("function", {})
    echoed = message | additions | {"tool_calls": [call | extra | {"function": function}]}

    assert chat(messages=[*MESSAGES, echoed]) == chat(messages=[*MESSAGES, message])


def test_options_that_cannot_matter_are_accepted() -> None:
    """Options about caches and padding of streams change nothing."""
    tool = WEATHER | {"cache_control": {"type": "ephemeral"}}
    request = chat(
        tools=[tool],
        stream=True,
        stream_options={"include_obfuscation": False},
        prompt_cache_options={"mode": "explicit"},
    )

    assert request == chat(tools=[WEATHER], stream=True)


def test_a_cache_retention_of_openai_is_a_retention() -> None:
    """`24h` retains the KV for a day, unless `retention_s` is given; `in_memory` is the default; others are refused."""
    day = chat(prompt_cache_retention="24h").scheduling

    assert day.retention.seconds == 86_400
    assert chat(prompt_cache_retention="24h", retention_s=7).scheduling.retention.seconds == 7
    for value in ("in_memory", "in-memory", None):
        assert chat(prompt_cache_retention=value) == chat()
    with pytest.raises(InvalidRequestError, match="prompt_cache_retention"):
        chat(prompt_cache_retention="1h")


def test_a_conversation_keeps_its_turns() -> None:
    """Parts are joined, tool calls and their answers kept, a developer is the system, template variables passed on."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}],
                "name": "Ann",
            },
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
        ],
        tools=[WEATHER],
        chat_template_kwargs={"enable_thinking": False},
        reasoning_effort="low",
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=3,
    )
    turns = request.chat.messages

    assert [(turn.role, turn.content, turn.name) for turn in turns] == [
        ("system", "be brief", ""),
        ("user", "hello", "Ann"),
        ("assistant", "", ""),
        ("tool", "sunny", ""),
    ]
    assert json.loads(turns[2].tool_calls_json) == [call]
    assert turns[3].tool_call_id == "call_1"
    assert json.loads(request.chat.tools_json) == [WEATHER]
    assert json.loads(request.chat.template_variables_json) == {"enable_thinking": False, "reasoning_effort": "low"}
    assert request.stop.max_tokens == 9
    assert request.output.logprobs == 3
    assert not request.HasField("grammar")


def test_constraints_in_every_spelling_become_grammars() -> None:
    """OpenAI's response formats and vLLM's constraints are one thing."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    format_of = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}

    assert json.loads(chat(response_format=format_of).grammar.json_schema) == schema
    assert json.loads(chat(guided_json=schema).grammar.json_schema) == schema
    assert json.loads(chat(structured_outputs={"json": json.dumps(schema)}).grammar.json_schema) == schema
    assert chat(response_format={"type": "json_object"}).grammar.json_object
    assert not chat(response_format={"type": "json_object"}).grammar.whitespace
    assert chat(response_format={"type": "json_object", "whitespace": True}).grammar.whitespace
    assert chat(structured_outputs={"json": {}, "whitespace": True}).grammar.whitespace
    assert not chat(response_format={"type": "text"}).HasField("grammar")
    assert chat(guided_regex="a+").grammar.regex == "a+"
    assert list(chat(structured_outputs={"choice": ["x", "y"]}).grammar.choice.choices) == ["x", "y"]
    assert completion(guided_grammar='start: "x"').grammar.ebnf == 'start: "x"'


def tools_of(parser: str = "hermes", **fields: Any) -> Tools:
    """Return the tools in a conversation with a model of this family."""
    return read_tools(chat(parser, **fields), model_format(parser, "{{ tools }}", {}))


def test_a_call_that_must_be_made_is_a_grammar() -> None:
    """`required` and a named function constrain the output for every model; `none` hides the tools."""
    named = {"type": "function", "function": {"name": "weather"}}

    assert tools_of("plain", tools=[TIME, WEATHER], tool_choice="required") == Tools(
        shown=True, functions=FUNCTIONS, required=True, single=False, has_grammar=True
    )
    assert tools_of("plain", tools=[TIME, WEATHER], tool_choice=named) == Tools(
        shown=True, functions=FUNCTIONS[1:], required=True, single=True, has_grammar=True
    )
    assert tools_of("plain", tools=[WEATHER], tool_choice="none") == Tools()
    assert template_input(chat("plain", tools=[WEATHER], tool_choice="none").chat).tools is None


def test_calls_of_a_strict_tool_follow_its_schema() -> None:
    """If the model decides, a grammar makes calls only for a strict tool of a family whose calls have a marker."""
    strict = [TIME, {"type": "function", "function": WEATHER["function"] | {"strict": True}}]

    assert not tools_of(tools=[TIME, WEATHER]).has_grammar
    assert tools_of(tools=strict, parallel_tool_calls=False) == Tools(
        shown=True, functions=(FUNCTIONS[0], replace(FUNCTIONS[1], strict=True)), single=True, has_grammar=True
    )
    assert not tools_of("llama3_json", tools=strict).has_grammar
    assert not tools_of(tools=strict, guided_regex="a").has_grammar


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_may_be_called(mode: str) -> None:
    """The model sees all tools, and the grammar has the allowed ones."""
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "weather"}}]}
    fields: dict[str, Any] = {
        "tools": [TIME, WEATHER],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
    }

    tools = tools_of(**fields)
    grammar = make_grammar(tools, model_format("hermes", "{{ tools }}", {}), reasons=False)

    assert (tools.functions, tools.required, tools.has_grammar) == (FUNCTIONS[1:], mode == "required", True)
    assert grammar is not None
    assert ("weather" in grammar.ebnf, "time" in grammar.ebnf) == (True, False)
    assert tools_of("llama3_json", **fields).functions == FUNCTIONS[1:]
    assert len(template_input(chat(**fields).chat).tools or ()) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 3}, "max_token: unknown field; did you mean 'max_tokens'?"),
        ({"colour": 3}, "colour: unknown field; remove it"),
        ({"use_beam_search": True}, "use_beam_search: not supported; use n to sample several choices"),
        ({"functions": []}, "functions: not supported; use tools"),
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"stream": "yes"}, "stream: must be true or false"),
        ({"max_tokens": -1}, "max_tokens: must be >= 0"),
        ({"max_tokens": 1.5}, "max_tokens: must be an integer"),
        ({"max_tokens": "3"}, "max_tokens: must be an integer"),
        ({"max_tokens": 2**32}, "max_tokens: must be <= 4294967295"),
        ({"seed": 2**64}, "seed: must be < 18446744073709551616"),
        ({"n": 0}, "n: must be >= 1"),
        ({"ttft_target_s": 0}, "ttft_target_s: must be > 0"),
        ({"retention_s": 0}, "retention_s: must be > 0"),
        ({"retention_s": 86401}, "retention_s: must be <= 86400"),
        ({"retention_priority": 10}, "retention_priority: must be <= 9"),
        ({"expected_pause_s": -1}, "expected_pause_s: must be > 0"),
        ({"ttft_target_s": 1e9}, "ttft_target_s: must be <= 31536000"),
        ({"stop": [1]}, "stop[0]: must be a string"),
        ({"stop": {}}, "stop: must be a string or a list"),
        ({"guided_json": 3}, "guided_json: must be an object or a string"),
        ({"allowed_token_ids": []}, "allowed_token_ids: must not be empty"),
        ({"max_tokens": 3, "max_completion_tokens": 4},
         "max_tokens: differs from max_completion_tokens; use one of them (max_tokens is the old name)"),
        ({"messages": [{"role": "user"}]},
         "messages[0].content: missing; add a text (only a message with tool_calls needs none)"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": None, "tool_calls": []}]},
         "messages[1].content: missing; add a text (only a message with tool_calls needs none)"),
        ({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]}]},
         "messages[0].content[1]: parts of type 'image_url' are not supported, because the server reads text only;"
         " send text parts"),
        ({"tool_choice": {}},
         "tool_choice: 'type' is missing; it is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: 'type' must be one of 'function', 'allowed_tools'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function: missing; it is required"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": []}}},
         "tool_choice.allowed_tools.mode: must be 'auto' or 'required'; tool_choice.allowed_tools.tools: must not be"
         " empty"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": name}} for name in ("weather", "f")]}}},
         "tool_choice.allowed_tools.tools[1]: no tool is named 'f'; use the name of one of tools"),
        ({"tool_choice": "any"}, "tool_choice: must be 'none', 'auto' or 'required' or an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be 'text', 'json_object' or 'json_schema'"),
        ({"logit_bias": {"hello": 1}}, "logit_bias.hello: must match ^[0-9]{1,9}$"),
        ({"logit_bias": []}, "logit_bias: must be an object"),
        ({"model": "m" * 257}, "model: must have at most 256 characters"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": "hello"}, "messages: must be a list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: missing; it is required"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages[0].role: must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
         "messages[0].content[0]: parts of type 'image_url' are not supported, because the server reads text only;"
         " send text parts"),
        ({"top_logprobs": 3}, "top_logprobs: requires logprobs; set logprobs to true"),
        ({"tool_choice": "auto"}, "tool_choice: requires tools; add tools or set tool_choice to 'none'"),
        ({"tools": [WEATHER] * 513}, "tools: must have at most 512 items, not 513"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
         "tool_choice.function.name: no tool is named 'f'; use the name of one of tools"),
        ({"tools": [WEATHER]},
         "tools: the served model's chat template does not support tools; set tool_choice to 'required' or to a named"
         " function"),
        ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"},
         "tool_choice: cannot be combined with guided_regex; remove one of them"),
        ({"guided_regex": "a", "guided_choice": ["a"]},
         "guided_choice: cannot be combined with guided_regex; use one constraint"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: missing; it is required"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named_with_its_remedy(fields: dict[str, Any], message: str) -> None:
    """The message names the field as the sender wrote it, what is wrong, and what to do."""
    with pytest.raises(InvalidRequestError) as error:
        chat("plain", **fields)

    assert error.value.message == message


def test_a_forced_call_has_no_form_of_text() -> None:
    """A client may send `response_format` with a forced call; it has no effect, as in OpenAI's API."""
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}
    forced = chat(tools=[WEATHER], tool_choice="required", response_format=form)
    free = chat(tools=[WEATHER], response_format=form)

    assert not forced.HasField("grammar")
    assert free.HasField("grammar")


TURN = b'[{"role": "user", "content": "a"}]'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "body: empty; send a JSON object"),
        (b"hello", "body: invalid JSON at line 1 column 1"),
        (b'{"a":\n 1,}', "body: invalid JSON at line 2 column 4"),
        (b'{"messages": [', "body: invalid JSON at line 1 column 14"),
        (b"{'a': 1}", "body: invalid JSON at line 1 column 2"),
        (b'{"a": ' + b"[" * 10_000, "body: invalid JSON at line 1 column "),
        (b'{"a": "\xff"}', "body: invalid JSON at line 1 column 8"),
        (
            b'{"a": "\\ud800"}',
            "body: invalid JSON at line 1 column 14: unexpected end of hex escape; send a JSON object in UTF-8",
        ),
        (b"[1]", "body: must be a JSON object"),
        (b"null", "body: must be a JSON object"),
        (b'{"messages": NaN}', "body: invalid JSON at line 1 column "),
        (b'{"messages": %s, "seed": 1, "seed": 2}' % TURN, "seed: given twice (second at line 1 column "),
        (b'{"messages": %s, "metadata": {"a": NaN}}' % TURN, "body: invalid JSON at line 1 column "),
        (
            b'{"messages": %s, "chat_template_kwargs": {"a": [-1e999]}}' % TURN,
            "chat_template_kwargs.a[0]: must be a finite number",
        ),
        (b'{"messages": [{"role": "a", "content": "", "role": "b"}]}', "role: given twice"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(raw: bytes, message: str) -> None:
    """Whatever the bytes are, the message says where they stop being a JSON object."""
    with pytest.raises(InvalidRequestError) as error:
        parse(ChatBody, raw)

    assert error.value.message.startswith(message)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a"] * 257, "prompt: must have at most 256 items, not 257"),
        ([], "prompt: must not be empty"),
        ([-1], "prompt[0]: must be >= 0"),
        ({}, "prompt: must be a string or a list"),
        ([[["a"]]], "prompt[0][0]: must be an integer"),
    ],
)
def test_of_several_forms_the_one_that_was_meant_is_explained(prompt: object, message: str) -> None:
    """If a field accepts several forms, the message is about the form closest to the value."""
    with pytest.raises(InvalidRequestError) as error:
        completion(prompt=prompt)

    assert error.value.message == message


def test_names_of_the_proto_are_names_of_http() -> None:
    """If checks use the proto's field names, the client's error has the HTTP names."""
    body = parse(ChatBody, json.dumps({"messages": MESSAGES, "max_completion_tokens": 5, "guided_regex": "a"}).encode())
    names = prepare_chat(body, "id", strict_order=False).names

    assert names("stop.max_tokens") == "max_completion_tokens"
    assert names("sampling.temperature") == "temperature"
    assert names("stop.stop_strings[3]") == "stop[3]"
    assert names("chat.messages[2].content") == "messages[2].content"
    assert names("grammar.regex") == "guided_regex"
    assert names("output.logprobs") == "top_logprobs"
    assert names("scheduling.cache_scope") == "cache_salt"
    assert names("model") == "model"


def test_an_answer_can_be_sent_back_as_clients_keep_it() -> None:
    """Fields that clients add to an answer are accepted in the history and have no effect."""
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "Hi.",
        "reasoning_content": "hm",
        "refusal": None,
        "annotations": [],
    }
    messages = [{"role": "user", "content": "Hi"}, turn | {"provider_specific_fields": {"refusal": None}}]
    body = parse(ChatBody, json.dumps({"messages": messages}).encode())

    assert body.messages[1].text == "Hi."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"stop": [1] * 5000}, "stop: must have at most 16 items, not 5000"),
        ({"metadata": {str(key): "x" for key in range(5000)}}, "metadata: must have at most 16 items, not 5000"),
        ({"metadata": {"key": "x" * 513}}, "metadata.key: must have at most 512 characters"),
        ({"logit_bias": {str(key): 1 for key in range(5000)}}, "logit_bias: must have at most 4096 items, not 5000"),
        ({"allowed_token_ids": ["1"] * 5000}, "allowed_token_ids[0]: must be an integer"),
        ({f"key{number}": 1 for number in range(5000)}, "body: must have at most 256 fields, not 5001"),
        ({"messages": [{"role": 1, "content": 2}] * 1000}, "messages[0].role: must be a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}] * 5000}]}, "messages[0].content: must have at"),
        ({"x" * 1_000_000: 1}, f"{'x' * 64}: unknown field; remove it"),
        ({"user": ["x"] * 200_000}, "body: more than "),
        ({"chat_template_kwargs": {"a": [{}] * 70_000}}, "chat_template_kwargs: must have at most 65536 values"),
        ({"guided_json": {"a": [[1] * 10_000] * 7}}, "guided_json: must have at most 65536 values"),
        ({"user": [1] * 1_500_000}, "body: more than "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_examines_only_the_start_of_a_body(body: dict[str, Any], message: str) -> None:
    """A body with thousands of mistakes is refused with a short message, after a number of calls with a fixed bound."""
    raw = json.dumps({"messages": MESSAGES} | body).encode()
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        with pytest.raises(InvalidRequestError) as refused:
            parse(ChatBody, raw)
    finally:
        sys.setprofile(None)

    assert refused.value.message.startswith(message)
    assert len(refused.value.message) < 2000
    assert calls < 100_000


def test_the_json_of_all_fields_is_bounded_together() -> None:
    """All fields without a schema together have at most twice the number of values permitted for one."""
    function = {"name": "f", "parameters": {"enum": [[]] * 1000}}
    body: dict[str, Any] = {"messages": MESSAGES, "tools": [{"type": "function", "function": function}] * 200}

    with pytest.raises(InvalidRequestError) as refused:
        parse(ChatBody, json.dumps(body).encode())

    (violation,) = refused.value.violations
    assert violation.field.startswith("tools[1")
    assert violation.field.endswith("].function.parameters")
    assert violation.description.startswith("must have at most ")
    assert parse(ChatBody, json.dumps(body | {"tools": body["tools"][:60]}).encode()).tools
