"""Mutated requests of every HTTP endpoint against a real service: no 5xx, no hang, nothing left behind.

A call starts as a valid request. Hypothesis changes parts of its JSON, its bytes, its headers and its framing. The
client may disconnect at any time or not read its stream.
"""

import copy
import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from measure.testbed.service import Served, serve
from tests.e2e.reciting_model import make_reciting_model
from tests.examples import examples

PATIENCE_S = 60.0
"""Time limit for any byte; a call that takes longer hangs."""
SAYS = ["<think>", "I think.", "</think>", "Done.", "<tool_call>", '{"name": "look", "arguments": {', '"at": 1', "}}"]
SAYS.append("</tool_call>")
RELEASE_EXAMPLES = 4000

Json = Any


class Raw(str):
    """JSON text as it is, valid or not."""


class Pairs(list[tuple[str, Json]]):
    """An object whose keys may occur twice."""


# Valid requests.

SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
CHAT = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": "é"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
]
SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["END"], "max_tokens": 6, "n": 2,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"3": 1.5},
    "bad_words": ["bad"], "stop_token_ids": [7], "min_tokens": 1, "allowed_token_ids": [4, 5, 6], "user": "u",
    "priority": 1, "cache_salt": "s", "stream": True, "stream_options": {"include_usage": True}, "metadata": {"a": "b"},
    "prompt_logprobs": 1, "return_token_ids": True, "expected_output_tokens": 5, "ttft_target_s": 1.0,
}  # fmt: skip
ITEMS = [
    {"type": "message", "role": "developer", "content": "Rules."},
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
    {"type": "function_call", "call_id": "c1", "name": "look", "namespace": "eye", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "7"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
    {"type": "item_reference", "id": "@item"},
]
FUNCTION_ITEM = {"type": "function", "strict": True, **FUNCTION}
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "x", "signature": "y"},
            {"type": "text", "text": "ok"},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": [{"type": "text", "text": "7"}]}
        ],
    },
]
MESSAGES = {
    "model": "demo", "messages": BLOCKS, "system": [{"type": "text", "text": "Rules."}],
    "thinking": {"type": "enabled"},
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}, {"type": "web_search_20250305"}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "output_config": {"effort": "low"},
}  # fmt: skip
BODIES: list[tuple[str, Json]] = [
    ("/v1/chat/completions", {"model": "demo", "messages": CHAT, "tools": [TOOL]} | SAMPLING),
    ("/v1/chat/completions", {"messages": CHAT[:2], "tools": [TOOL], "tool_choice": "required", "max_tokens": 9}),
    (
        "/v1/chat/completions",
        {
            "messages": CHAT[:2], "logprobs": True, "top_logprobs": 3, "max_completion_tokens": 7, "stream": False,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low", "continue_final_message": False,
        },
    ),
    ("/v1/chat/completions", {"messages": CHAT[:2], "structured_outputs": {"regex": "[a-z]{2,4}"}, "max_tokens": 5}),
    ("/v1/completions", {"model": "demo", "prompt": "the fox", "echo": True, "logprobs": 2} | SAMPLING),
    ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 3, "guided_choice": ["a", "b"]}),
    (
        "/v1/responses",
        {
            "model": "demo", "input": ITEMS, "instructions": "Be short.", "stream": True, "store": False,
            "tools": [
                FUNCTION_ITEM,
                {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
                {"type": "namespace", "name": "eye", "tools": [FUNCTION_ITEM]},
                {"type": "web_search"},
            ],
            "tool_choice": "auto", "reasoning": {"effort": "low", "summary": "auto"}, "max_output_tokens": 8,
            "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"}, "parallel_tool_calls": False,
        },
    ),
    (
        "/v1/responses",
        {
            "input": "hi", "previous_response_id": "@response", "max_output_tokens": 5, "temperature": 0.5,
            "top_p": 0.9,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
        },
    ),
    (
        "/v1/responses",
        {"input": ITEMS[:2], "tools": [FUNCTION_ITEM], "tool_choice": {"type": "function", "name": "look"}},
    ),
    (
        "/v1/responses/input_tokens",
        {
            "model": "demo", "input": ITEMS, "instructions": "Be short.", "tools": [FUNCTION_ITEM],
            "tool_choice": "required", "reasoning": {"effort": "low"}, "parallel_tool_calls": False,
            "previous_response_id": "@response", "truncation": "disabled", "text": {"format": {"type": "text"}},
        },
    ),
    ("/v1/responses/input_tokens", {"input": "the fox"}),
    # Send a body although no handler needs one.
    ("/v1/responses/@response", {"id": "@response", "metadata": {"a": ["b"]}}),
    ("/v1/messages", MESSAGES | {"max_tokens": 8, "stream": True, "stop_sequences": ["END"], "top_k": 5}),
    ("/v1/messages?beta=true", MESSAGES | {"max_tokens": 20, "temperature": 0.5, "tool_choice": {"type": "any"}}),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/v1/embeddings", {"model": "demo", "input": ["a", "b"], "encoding_format": "base64", "pooling": "mean"}),
    ("/v1/embeddings", {"input": [[5, 6], [7]], "dimensions": 64, "normalize": False}),
    ("/tokenize", {"messages": CHAT, "tools": [TOOL], "add_generation_prompt": False}),
    ("/tokenize", {"prompt": "the fox", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/console/api/watch", {"tables": True}),
    ("/console/api/explain", {"request": "@request"}),
    ("/console/api/strategies", {"rows": 4, "seconds": 60}),
    ("/console/api/drain", {"worker": "none", "move": True}),
    ("/console/api/resume", {"worker": "none"}),
]  # fmt: skip
PATHS = [
    "/", "/health", "/ping", "/ready", "/version", "/metrics", "/docs", "/openapi.json", "/v1/models",
    "/v1/models/demo", "/v1/responses/@response", "/console/app.js",
]  # fmt: skip

# Changes.

DEEP = Raw("[" * 2000 + "]" * 2000)
WEIRD: st.SearchStrategy[Json] = st.one_of(
    st.sampled_from(
        [
            None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, -(2**63) - 1, 2**64, 10**30, 1.5, -0.0, 1e308, "", " ",
            "\0", "x" * 300, "🙂", "\u202e", [], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, {"type": None},
            "none", "a" * 70_000, ["a"] * 3000, {"$ref": "#"},
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
            DEEP, Raw("NaN"), Raw("-Infinity"), Raw("1e999"), Raw("1" * 5000),
            Raw('"\\ud800"'), Raw('"\\udfff\\ud800"'),
            Raw("{'a': 1}"), Raw("01"), Raw('"\\x"'), Raw("undefined"), Raw(""),
        ]
    ),
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.recursive(st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=5),
                 lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)),
)  # fmt: skip
CONTENT_TYPES = [
    "",
    "text/plain",
    "application/json; charset=latin-1",
    "multipart/form-data; boundary=x",
    "a" * 2000,
    "é",
]
HEADERS = [
    ("X-Request-Timeout", "0"), ("X-Request-Timeout", "nan"), ("X-Request-Timeout", "0.001"), ("X-Api-Key", ""),
    ("X-Request-Id", "é" * 200), ("X-Request-Id", " "), ("traceparent", "00-" + "z" * 32 + "-1-1"),
    ("Authorization", "Bearer \x7f"), ("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Origin", "null"),
    ("Expect", "100-continue"), ("anthropic-beta", "x," * 500), ("Accept", "\xff"), ("Transfer-Encoding", "gzip"),
    ("Host", "evil.example"),
]  # fmt: skip


def places(value: Json, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of a value but the root."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
    for key, inner in entries:
        yield (*here, key)
        yield from places(inner, (*here, key))


@st.composite
def mutated(draw: st.DrawFn, seed: Json) -> Json:
    """Return the value with some of its parts replaced, lost, repeated, renamed or moved."""
    value = copy.deepcopy(seed)
    # Return a copy each time, so that a later change does not reach the value that the strategy may return again.
    weird = WEIRD.map(copy.deepcopy)
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 4)))):
        paths = list(places(value))
        if not paths:
            break
        *path, key = draw(st.sampled_from(paths))
        holder = value
        for step in path:
            holder = holder[step]
        match draw(st.sampled_from(("replace", "replace", "replace", "drop", "repeat", "rename", "move", "add"))):
            case "replace":
                holder[key] = draw(weird)
            case "drop":
                del holder[key]
            case "repeat" if isinstance(holder, list):
                holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(draw(st.sampled_from((1, 2, 600))))]
            case "repeat" if not path:
                return Pairs([*value.items(), (key, value[key])])
            case "rename" if isinstance(holder, dict):
                holder[draw(st.text(max_size=4) | st.just(f"{key}_"))] = holder.pop(key)
            case "move":
                part: Json = value
                for step in draw(st.sampled_from(paths)):
                    part = part[step]
                holder[key] = copy.deepcopy(part)
            case "add" if isinstance(holder, dict):
                name = draw(st.sampled_from(("n", "model", "type", "stream", "input", "tools", "unknown")))
                holder[name] = draw(weird)
    return value


def written(value: Json) -> str:
    """Return a value as JSON, with the freedom of `Raw` and `Pairs`."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, (dict, Pairs)):
        pairs = value if isinstance(value, Pairs) else value.items()
        return "{" + ",".join(f"{json.dumps(key)}:{written(inner)}" for key, inner in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


BEGIN = "{} {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


@dataclass(frozen=True, slots=True)
class Call:
    """A request as bytes, and the behaviour of its client."""

    head: str
    body: bytes
    client: Literal["reads", "leaves", "leaves early", "sends half", "does not read"] = "reads"
    well_formed: bool = True
    """Whether head and framing are valid, so that there must be an answer."""

    @property
    def path(self) -> str:
        """The path without the query."""
        return self.head.split(" ")[1].partition("?")[0]

    @property
    def method(self) -> str:
        """The method."""
        return self.head.partition(" ")[0]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Return a call of any endpoint."""
    if draw(st.integers(0, 9)) == 0:
        method = draw(st.sampled_from(("GET", "GET", "HEAD", "DELETE", "PUT", "OPTIONS", "POST", "BREW")))
        path = draw(st.sampled_from(PATHS) | st.sampled_from([path for path, _ in BODIES]))
        path += draw(st.sampled_from(("", "", "", "/", "/..", "%00", "%2f%2e", "?" + "a" * 3000, "/é", "?beta=%ff")))
        return Call(BEGIN.format(method, path), b"")
    path, seed = draw(st.sampled_from(BODIES))
    method = draw(st.sampled_from(("DELETE",) * 9 if "@" in path else ("POST",) * 30) | st.sampled_from(("PUT", "GET")))
    body = written(draw(mutated(seed))).encode(errors="surrogatepass")
    match draw(st.sampled_from(("as it is",) * 12 + ("cut", "bits", "bom", "twice", "gzip", "utf-16", "empty"))):
        case "cut":
            body = body[: draw(st.integers(0, len(body)))]
        case "bits":
            where = draw(st.integers(0, len(body) - 1)) if body else 0
            body = body[:where] + draw(st.binary(max_size=3)) + body[where + 1 :]
        case "bom":
            body = b"\xef\xbb\xbf" + body
        case "twice":
            body += body
        case "gzip":
            body = gzip.compress(body)
        case "utf-16":
            body = body.decode(errors="replace").encode("utf-16")
        case "empty":
            body = b""
    types = ["application/json"] * 12 + CONTENT_TYPES
    extra = draw(st.lists(st.sampled_from(HEADERS), max_size=1) | st.just([]))
    head = f"{BEGIN.format(method, path)}Content-Type: {draw(st.sampled_from(types))}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in extra)
    client = draw(st.sampled_from(("reads",) * 6 + ("leaves", "leaves early", "sends half", "does not read")))
    well_formed = client != "sends half" and not any(
        name in ("Transfer-Encoding", "Host", "Accept") for name, _ in extra
    )
    if draw(st.integers(0, 5)) == 0:
        size = draw(st.sampled_from((1, 7, 4096)))
        chunks = [body[i : i + size] for i in range(0, min(len(body), 200 * size), size)] + [b""]
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        return Call(head + "Transfer-Encoding: chunked\r\n", body, client, well_formed and "gzip" not in str(extra))
    return Call(head + f"Content-Length: {len(body)}\r\n", body, client, well_formed)


# The client.


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    content_type: str
    text: str


class Target:
    """A service and the ids of a response that it has stored."""

    def __init__(self, served: Served) -> None:
        """Fetch once: later calls get the same response, with real ids."""
        self.served = served
        self.names: dict[str, str] = {}
        self.question = self._call("/v1/responses", {"input": "the fox", "max_output_tokens": 20})
        self.expected = self.store()

    def _call(self, path: str, body: Json) -> Call:
        content = json.dumps(body).encode()
        head = f"{BEGIN.format('POST', path)}Content-Type: application/json\r\n"
        return Call(f"{head}Content-Length: {len(content)}\r\n", content)

    def store(self) -> Answer:
        """Let the service store a response, and learn its ids."""
        answer = self.ask()
        response = json.loads(answer.text)
        self.names = {
            "@response": response["id"], "@item": response["output"][0]["id"], "@request": response["id"][5:],
        }  # fmt: skip
        return answer

    def ask(self) -> Answer:
        """Ask the same question again."""
        answer = self.send(self.question)
        assert answer is not None
        assert answer.status == 200, answer.text
        return answer

    def send(self, call: Call) -> Answer | None:
        """Send a call; None if its client left, or the server closed the connection."""
        host, _, port = self.served.http.rpartition(":")
        head, body = call.head.encode("latin-1", "replace"), call.body
        for name, value in self.names.items():
            # Keep the length, so that the framing stays valid.
            head, body = head.replace(name.encode(), value.encode()), _replaced(body, name, value)
        head = _with_length(head, len(body))
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
            try:
                connection.sendall(head + b"\r\n" + (body[: len(body) // 2] if call.client == "sends half" else body))
                if call.client in ("leaves", "sends half"):
                    return None
                if call.client == "does not read":
                    connection.settimeout(0.05)
                if call.client in ("leaves early", "does not read") or call.path == "/console/api/watch":
                    connection.recv(200)
                    return None
                response = http.client.HTTPResponse(connection, method=call.method)
                response.begin()
                text = response.read().decode(errors="replace")
                return Answer(response.status, response.getheader("content-type", ""), text)
            except TimeoutError:
                assert call.client == "does not read", f"no byte for {PATIENCE_S} s: {call}"
                return None
            except (ConnectionError, http.client.HTTPException):
                assert not call.well_formed, f"no answer to {call}"
                return None


def _replaced(body: bytes, name: str, value: str) -> bytes:
    return body.replace(name.encode(), value.encode())


def _with_length(head: bytes, length: int) -> bytes:
    lines = [line for line in head.split(b"\r\n") if line]
    lines = [b"Content-Length: %d" % length if line.startswith(b"Content-Length") else line for line in lines]
    return b"\r\n".join([*lines, b""])


# The promises.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Return a service whose model thinks, speaks and calls a tool."""
    model = make_reciting_model(tmp_path_factory.mktemp("model"), SAYS, max_model_len=2048)
    with serve(model, "--parser=hermes", "--served-model-name=demo", "--default-max-tokens=20") as served:
        yield Target(served)


def check(target: Target, call: Call) -> None:
    """Send a call and check its answer."""
    answer = target.send(call)
    if call.method == "DELETE" and "@response" in call.path:
        target.store()
    if answer is None:
        return
    # A client can cause a 5xx by setting a deadline, or by sending an unsupported transfer coding.
    late = answer.status == 504 and "X-Request-Timeout" in call.head
    coded = answer.status == 501 and "Transfer-Encoding: gzip" in call.head
    assert answer.status < 500 or late or coded, f"{answer} to {call}"
    if answer.content_type.startswith("text/event-stream"):
        check_events(call, answer)
    elif answer.status == 400 and answer.content_type == "application/json":
        error = json.loads(answer.text)["error"]
        assert error["message"], f"{answer} to {call}"
        named = error["param"] if "param" in error else error["message"].partition(":")[0]
        assert named or call.head.startswith(("GET", "DELETE")), f"no field named: {answer} to {call}"


def check_events(call: Call, answer: Answer) -> None:
    """Check that a stream is complete."""
    *blocks, rest = answer.text.split("\n\n")
    assert rest == "", f"a half event: {rest!r} to {call}"
    payloads = [block.rpartition("data: ")[2] for block in blocks]
    if call.path in ("/v1/chat/completions", "/v1/completions"):
        assert payloads.pop() == "[DONE]", f"{answer} to {call}"
    events = [json.loads(data) for data in payloads]
    if call.path in ("/v1/responses", "/v1/messages"):
        ends = {"response.completed", "response.incomplete", "message_stop", "error"}
        assert events[-1]["type"] in ends, f"{answer} to {call}"


def check_unharmed(target: Target) -> None:
    """Check that nothing of the calls is left, nothing failed unexpectedly, and answers are the same as before."""
    target.served.wait_until_empty()
    first, again = (json.loads(answer.text) for answer in (target.expected, target.ask()))
    for response in (first, again):
        response["output"] = [{**item, "id": "", "call_id": ""} for item in response["output"]]
        response |= {"id": "", "created_at": 0, "usage": {**response["usage"], "input_tokens_details": {}}}
    assert again == first
    bad = [line for line in target.served.log_lines() if line["level"] in ("error", "critical")]
    assert bad == []
    assert "Traceback" not in target.served.log.read_text()


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck), deadline=None)
@given(call=calls())
@example(call=Call("POST /v1/messages HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n", b""))
def test_no_call_does_harm(target: Target, call: Call) -> None:
    """Each call gets a response below 500 that names the wrong field, and its streams are complete."""
    check(target, call)


@pytest.mark.release
@pytest.mark.timeout(3600)
@settings(max_examples=RELEASE_EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
@given(call=calls())
def test_no_call_of_many_does_harm(target: Target, call: Call) -> None:
    """The same with many more calls."""
    check(target, call)


def test_calls_leave_nothing_behind(target: Target) -> None:
    """After all calls the service is empty, has logged no failure, and answers as before."""
    check_unharmed(target)
