"""HTTP exchanges with a real front end: errors, clients that leave or do not read, deadlines, shutdown."""

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.trace import SpanKind, format_span_id
from starlette.types import Message

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services import frontend
from services.access import shares
from services.access.principals import Principals
from services.http import server
from services.http.answers import Answer
from services.http.endpoint import Endpoints, Exchange
from services.http.errors import MESSAGES
from services.link import core_link
from tests.services.stack import MODEL, PATIENCE_S, Stack, TestCore, running_stack, tokens_request
from tests.services.test_stalled_readers import LONG, gives_no_more_credit
from tests.services.test_tracing import PARENT_ID, TRACE_ID, TRACEPARENT, KeptTelemetry

FOREVER = 4000
JSON = {"content-type": "application/json"}


def body(*prompt: int, **fields: Any) -> dict[str, Any]:
    """A completion to which the echo core responds with its own prompt, over and over."""
    return {"prompt": list(prompt), "max_tokens": 8, **fields}


async def events(response: httpx.Response) -> list[Any]:
    """The events of a stream, the last one as text."""
    lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


@asynccontextmanager
async def open_stream(stack: Stack, **fields: Any) -> AsyncIterator[AsyncIterator[str]]:
    """Return a stream's lines after the first one has been read."""
    request = body(5, 6, 7, stream=True, **{"max_tokens": FOREVER, **fields})
    async with stack.http.stream("POST", "/v1/completions", json=request) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        await anext(lines)
        yield lines


async def rest(lines: AsyncIterator[str]) -> list[str]:
    """Return the remaining non-empty lines of a stream."""
    return [line async for line in lines if line]


def has_cancelled(core: TestCore) -> bool:
    """A stream was cancelled."""
    return bool(core.cancelled)


def test_the_head_of_a_request_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless headers, an incomplete head, and a silent connection are closed."""
    beginning = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    last = b"connection: close\r\n\r\n"

    async def answer(stack: Stack, *sent: bytes, patience_s: float = PATIENCE_S) -> bytes:
        """Return everything until the server closes; send each piece after the response to the previous one."""
        reader, writer = await asyncio.open_connection(stack.http.base_url.host, stack.http.base_url.port)
        try:
            for piece in sent[:-1]:
                writer.write(piece)
                await reader.readuntil(b"ok\n")
            monkeypatch.setattr(server, "HEAD_TIMEOUT_S", patience_s)
            writer.write(sent[-1])
            return await reader.read()
        finally:
            writer.close()

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.timeout(PATIENCE_S):
            # Read to the last byte, because the kernel resets a connection that is closed with pending bytes.
            endless = (beginning + b"x: ").ljust(server.MAX_HEAD_BYTES + 1, b"x")
            assert (await answer(stack, endless)).startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
            long = (beginning + b"x: ").ljust(server.MAX_HEAD_BYTES // 2, b"x") + b"\r\n" + last
            assert (await answer(stack, long)).startswith(b"HTTP/1.1 200 OK\r\n")
            late = await answer(stack, beginning + b"\r\n", beginning, patience_s=0.05)
            assert late.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
            assert (await answer(stack, b"")) == b""

    asyncio.run(main())


def test_an_id_that_no_header_can_hold_is_refused(tmp_path: Path) -> None:
    """A request id that no header can hold is named in an error; one with surrounding blanks is accepted."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for path, wrong in (
                ("/v1/completions", body(5, request_id="a\nx: y")),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "request_id": "\n"}),
                ("/v1/embeddings", {"input": "x", "request_id": "é"}),
            ):
                refused = await stack.http.post(path, json=wrong)

                assert refused.status_code == 400
                assert refused.json()["error"]["param"] == "request_id"
            served = await stack.http.post("/v1/completions", json=body(5, request_id=" mine "))
            assert (served.status_code, served.headers["x-request-id"]) == (200, "mine")

    asyncio.run(main())


def test_an_answer_and_its_stream_agree(tmp_path: Path) -> None:
    """A completion's text, usage and ids are the same at once and in pieces; the id is the client's."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            whole = (await stack.http.post("/v1/completions", json=body(70, 71, 72, request_id="mine"))).json()
            async with stack.http.stream(
                "POST",
                "/v1/completions",
                json=body(70, 71, 72, stream=True, stream_options={"include_usage": True}),
                headers={"X-Request-Id": "mine-2"},
            ) as response:
                chunks = await events(response)

            assert whole["id"] == "cmpl-mine"
            assert response.headers["x-request-id"] == "mine-2"
            assert response.headers["content-type"].startswith("text/event-stream")
            assert chunks.pop() == "[DONE]"
            assert (
                "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
                == whole["choices"][0]["text"]
            )
            assert chunks[-1]["usage"] == whole["usage"]
            assert whole["usage"]["completion_tokens"] == 8

    asyncio.run(main())


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "n": 3}),
        ("/v1/completions", body(70, 71, 72)),
        ("/v1/completions", body(70, 71, 72, n=3)),
        ("/v1/completions", body(70, 71, 72, echo=True)),
        ("/v1/completions", body() | {"prompt": [[70], [71, 72]], "n": 2}),
    ],
    ids=["chat", "chat, 3 choices", "completion", "completion, 3 choices", "echo", "2 prompts, 2 choices each"],
)
def test_continuous_usage_counts_up_to_the_final_usage(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    """With `continuous_usage_stats`, every chunk counts the prompt and the tokens so far of all choices.

    No count ever falls, and the last chunk has the final counts. Cached tokens are reported once they are known.
    """

    async def main() -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        async with running_stack(tmp_path) as stack:
            whole = (await stack.http.post(path, json=fields)).json()["usage"]
            request = {**fields, "stream": True, "stream_options": options}
            async with stack.http.stream("POST", path, json=request) as response:
                chunks = (await events(response))[:-1]

            final, usages = chunks[-1]["usage"], [chunk["usage"] for chunk in chunks[:-1]]
            assert final == whole
            prompts, completed, totals = (
                [usage[name] for usage in usages] for name in ("prompt_tokens", "completion_tokens", "total_tokens")
            )
            assert prompts[0] > 0
            assert prompts == sorted(prompts)
            assert completed == sorted(completed)
            assert totals == [sum(pair) for pair in zip(prompts, completed, strict=True)]
            assert (prompts[-1], completed[-1]) == (final["prompt_tokens"], final["completion_tokens"])
            assert isinstance(fields.get("prompt", [0])[0], list) or len(set(prompts)) == 1
            assert "prompt_tokens_details" not in usages[0]
            assert final["prompt_tokens_details"] == {"cached_tokens": 0}

    asyncio.run(main())


def test_cached_tokens_are_given_once_all_prompts_have_ended() -> None:
    """A sum over some of the prompts would be taken for the final one."""
    answer = Answer(chat=False, id="id", model="model", n=1, prompts=2)
    details = []
    for prompt, cached in enumerate((3, 4)):
        usage = v1.Usage(prompt_tokens=5, completion_tokens=1, cached_prompt_tokens=cached)
        list(answer.events(prompt, v1.GenerateResponse(finished=v1.Finished(usage=usage))))
        details.append(answer.usage().get("prompt_tokens_details"))

    assert details == [None, {"cached_tokens": 7}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(tmp_path: Path, stream: bool) -> None:
    """When a client that waits or reads a stream disconnects, the core is notified."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=20)) as stack:
            request = body(5, 6, max_tokens=FOREVER, stream=stream)
            waiting = asyncio.create_task(stack.http.post("/v1/completions", json=request))
            await stack.core.saw(lambda core: bool(core.submissions))
            waiting.cancel()
            await stack.core.saw(has_cancelled)
            await stack.core.saw(
                lambda core: core.reported("http_server_request_duration_seconds_count", error_type="CANCELLED") == 1
            )

            assert stack.core.reported("quire_live_streams") == 0

    asyncio.run(main())


def test_a_slow_reader_gets_no_more_than_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credit stops when a client stops reading; when the core gives the stream up, its connection is dropped."""
    monkeypatch.setattr(core_link, "REPORT_EVERY_S", 0.1)

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, tokens_per_step=512, model=LONG)) as stack:
            address = stack.http.base_url
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.host, address.port))
            reader, writer = await asyncio.open_connection(sock=client, limit=1024)
            request = json.dumps(body(5, 6, 7, stream=True, max_tokens=1 << 23)).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(request)}\r\n\r\n"
            )
            writer.write(head.encode() + request)
            await reader.readline()
            await stack.core.saw(gives_no_more_credit)
            end = link_pb2.StreamEnd(stream=stack.core.submissions[0].stream, reason=link_pb2.END_REASON_STALLED)
            stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, ends=[end]).SerializeToString())
            await stack.core.saw(
                lambda core: (
                    core.reported("http_server_request_duration_seconds_count", error_type="STALLED_READER") == 1
                )
            )
            with pytest.raises(asyncio.IncompleteReadError) as cut:
                await reader.readexactly(1 << 30)

            assert b"[DONE]" not in cut.value.partial
            assert stack.core.reported("quire_live_streams") == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reason", "status", "code", "retry"),
    [
        (link_pb2.END_REASON_QUEUE_FULL, 429, "queue_full", "3"),
        (link_pb2.END_REASON_NO_WORKER, 503, "no_worker", "1"),
        (link_pb2.END_REASON_SHUTDOWN, 503, "not_ready", "1"),
        (link_pb2.END_REASON_DEADLINE, 504, "deadline", "3"),
        (link_pb2.END_REASON_ROW_FAILED, 500, "row_failed", None),
        (link_pb2.END_REASON_CANCELLED, 410, "cancelled", None),
    ],
)
def test_ends_have_their_status(
    tmp_path: Path, reason: link_pb2.EndReason.ValueType, status: int, code: str, retry: str | None
) -> None:
    """The end of a refused or failed request has a status, a code and Retry-After, streamed or not."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(reason=reason, retry_ms=2500)
            for stream in (False, True):
                response = await stack.http.post("/v1/completions", json=body(5, stream=stream))

                assert response.status_code == status
                assert response.json()["error"]["code"] == code
                assert response.headers.get("retry-after") == retry

    asyncio.run(main())


def test_an_end_for_a_field_of_the_request_names_it_as_http_does(tmp_path: Path) -> None:
    """If constraints permit no token, the client must change them: 400, with the parameter's own name."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(
                reason=link_pb2.END_REASON_INVALID, message="leaves no token to choose", field="grammar"
            )
            response = await stack.http.post("/v1/completions", json=body(5) | {"guided_regex": "a+"})

            assert response.status_code == 400
            assert response.json()["error"]["param"] == "guided_regex"

    asyncio.run(main())


def test_an_error_amid_a_stream_is_an_event(tmp_path: Path) -> None:
    """When the head has gone out, the error comes as an event of OpenAI's form, and the stream ends properly."""

    async def main() -> None:
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, limit=20)) as stack,
            open_stream(stack) as lines,
        ):
            end = link_pb2.StreamEnd(stream=stack.core.submissions[0].stream, reason=link_pb2.END_REASON_ROW_FAILED)
            stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, ends=[end]).SerializeToString())
            last, done = (await rest(lines))[-2:]

            assert done == "data: [DONE]"
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "row_failed"

    asyncio.run(main())


LATE = [
    ("/v1/completions", {"prompt": "the fox"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the fox"}]}),
    ("/v1/responses", {"input": "the fox"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "the fox"}]}),
]


@pytest.mark.parametrize(("path", "fields"), LATE)
def test_a_late_error_has_the_form_of_its_api(tmp_path: Path, path: str, fields: dict[str, Any]) -> None:
    """The event has the fields that the official clients of the API read."""

    async def main() -> None:
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        request = {**fields, "model": MODEL.name, limit: 20, "stream": True}
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, limit=2)) as stack,
            stack.http.stream("POST", path, json=request) as response,
        ):
            assert response.status_code == 200
            lines = response.aiter_lines()
            events = [await anext(lines)]
            end = link_pb2.StreamEnd(stream=stack.core.submissions[0].stream, reason=link_pb2.END_REASON_ROW_FAILED)
            stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, ends=[end]).SerializeToString())
            events += [line async for line in lines]
        data = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
        error = data[-1]["error"]

        assert error["message"]
        if path == "/v1/messages":
            assert (data[-1]["type"], error["type"]) == ("error", "api_error")
        else:
            assert error["code"] == "row_failed"
        if path == "/v1/responses":
            assert data[-1]["type"] == "error"
            assert data[-1]["code"] == "row_failed"
            assert [event["sequence_number"] for event in data] == list(range(len(data)))
        assert ("event: error" in events) == (path in ("/v1/responses", "/v1/messages"))

    asyncio.run(main())


@pytest.mark.parametrize("path", [path for path, _ in LATE[:3]])
def test_openai_s_client_raises_a_late_error(tmp_path: Path, path: str) -> None:
    """A stream that fails after its first event raises an exception with the code instead of ending early."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=2)) as stack:
            client = openai.AsyncOpenAI(base_url=f"{stack.http.base_url}/v1", api_key="x", max_retries=0)
            message: Any = [{"role": "user", "content": "the fox"}]
            creates: dict[str, Any] = {
                "/v1/completions": partial(client.completions.create, prompt="the fox", max_tokens=20),
                "/v1/chat/completions": partial(client.chat.completions.create, messages=message, max_tokens=20),
                "/v1/responses": partial(client.responses.create, input="the fox", max_output_tokens=20),
            }
            stream = await creates[path](model=MODEL.name, stream=True)
            await anext(aiter(stream))
            end = link_pb2.StreamEnd(stream=stack.core.submissions[0].stream, reason=link_pb2.END_REASON_ROW_FAILED)
            stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, ends=[end]).SerializeToString())
            with pytest.raises(openai.APIError) as raised:
                async for _ in stream:
                    pass
            assert raised.value.code == "row_failed"
            await client.close()

    asyncio.run(main())


def test_a_deadline_is_kept(tmp_path: Path) -> None:
    """X-Request-Timeout reaches the core as its deadline; a value that is not a number is refused."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=2)) as stack:
            late = await stack.http.post("/v1/completions", json=body(5), headers={"X-Request-Timeout": "0.2"})
            wrong = await stack.http.post("/v1/completions", json=body(5), headers={"X-Request-Timeout": "soon"})

            assert late.status_code == 504
            assert late.json()["error"]["code"] == "deadline"
            assert 0 < stack.core.submissions[0].deadline_ns <= 200_000_000
            assert wrong.status_code == 400
            assert wrong.json()["error"]["param"] == "X-Request-Timeout"

    asyncio.run(main())


def test_bodies_are_bounded(tmp_path: Path) -> None:
    """A body above 8 MiB is refused, announced or not, and the server goes on."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            large = b'{"prompt": "' + b"x" * (8 << 20) + b'"}'

            async def pieces() -> AsyncIterator[bytes]:
                for begin in range(0, len(large), 1 << 20):
                    yield large[begin : begin + (1 << 20)]

            for content in (large, pieces()):
                response = await stack.http.post("/v1/completions", content=content, headers=JSON)
                assert response.status_code == 413
                assert response.json()["error"]["code"] == "request_too_large"
            assert (await stack.http.post("/v1/completions", json=body(5))).status_code == 200

    asyncio.run(main())


def test_a_compressed_body_is_refused(tmp_path: Path) -> None:
    """The response is 415 and names the header; a body whose header names no compression is read."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            content = gzip.compress(json.dumps(body(5)).encode())
            response = await stack.http.post(
                "/v1/completions", content=content, headers={**JSON, "content-encoding": "gzip"}
            )
            assert response.status_code == 415
            assert response.json()["error"]["message"].startswith("Content-Encoding: 'gzip' is not supported;")
            plain = {**JSON, "content-encoding": "identity"}
            response = await stack.http.post("/v1/completions", json=body(5), headers=plain)
            assert response.status_code == 200

    asyncio.run(main())


def test_what_does_not_fit_into_the_context_has_openais_code(tmp_path: Path) -> None:
    """Clients that shorten their prompts look for the code and for `maximum context length` in the message."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            longest = MODEL.max_model_len
            for request in (body(*[5] * longest), body(5, max_tokens=longest - 1), body(5, 6, max_tokens=longest - 1)):
                response = await stack.http.post("/v1/completions", json=request)
                fits = len(request["prompt"]) + request["max_tokens"] <= longest
                assert response.status_code == (200 if fits else 400)
                if not fits:
                    error = response.json()["error"]
                    assert error["code"] == "context_length_exceeded"
                    assert "maximum context length" in error["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("setting", "path", "prompt", "expected"),
    [
        (0, "/v1/completions", 2, 16),
        (0, "/v1/completions", MODEL.max_model_len - 3, 3),
        (0, "/v1/chat/completions", 2, None),
        (0, "/v1/responses", 2, None),
        (40, "/v1/completions", 2, 40),
        (40, "/v1/chat/completions", 2, 40),
    ],
)
def test_without_max_tokens_the_default_counts(
    tmp_path: Path, setting: int, path: str, prompt: int, expected: int | None
) -> None:
    """It is the rest of the context in chats, 16 in completions, and the server's own default if that is set."""
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": [5] * prompt},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
        "/v1/responses": {"input": "hello"},
    }

    async def main() -> None:
        async with running_stack(tmp_path, default_max_tokens=setting) as stack:
            response = await stack.http.post(path, json={"model": MODEL.name, **requests[path]})
            assert response.status_code == 200, response.text
            (submission,) = stack.core.submissions
            assert submission.max_tokens == (expected or MODEL.max_model_len - submission.num_prompt_tokens)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("keep", "expected"), [(-1, MODEL.max_model_len - 8), (10**6, MODEL.max_model_len - 8), (9, 9)]
)
def test_a_truncated_prompt_fits(tmp_path: Path, keep: int, expected: int) -> None:
    """`truncate_prompt_tokens` keeps at most what fits with the output, and -1 keeps exactly that, as in vLLM."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = body(*[5] * (MODEL.max_model_len + 1), truncate_prompt_tokens=keep)
            response = await stack.http.post("/v1/completions", json=request)
            assert response.status_code == 200, response.text
            assert [each.num_prompt_tokens for each in stack.core.submissions] == [expected]

    asyncio.run(main())


def test_a_base_url_without_v1_gets_a_hint(tmp_path: Path) -> None:
    """A client whose base URL lacks /v1 gets this hint; other unknown paths are listed in /docs."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            messages = {
                path: (await stack.http.post(path, json={})).json()["error"]["message"]
                for path in ("/chat/completions", "/nothing")
            }
            ping = await stack.http.get("/ping")

            assert messages == {
                "/chat/completions": "/chat/completions: not found; use /v1/chat/completions, that is, a base URL that"
                " ends with /v1",
                "/nothing": "/nothing: not found; /docs lists all paths",
            }
            assert ping.status_code == 200

    asyncio.run(main())


def test_tools_of_a_template_without_tools_are_refused(tmp_path: Path) -> None:
    """Every API refuses tools that the chat template cannot show, except for a forced call."""
    turns, schema = [{"role": "user", "content": "x"}], {"type": "object", "properties": {}}
    function = {"name": "now", "parameters": schema}
    calls: list[tuple[str, dict[str, Any], Any]] = [
        (
            "/v1/chat/completions",
            {"messages": turns, "tools": [{"type": "function", "function": function}]},
            "required",
        ),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **function}]}, "required"),
        ("/v1/messages", {"messages": turns, "tools": [{"name": "now", "input_schema": schema}]}, {"type": "any"}),
    ]

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for path, fields, forced in calls:
                request = fields | ({"max_tokens": 8} if path == "/v1/messages" else {})
                refused = await stack.http.post(path, json=request)
                assert refused.status_code == 400, f"{path}: {refused.text}"
                message = refused.json()["error"]["message"]
                assert message.startswith("tools: the served model's chat template does not support tools; "), path
                accepted = await stack.http.post(path, json=request | {"tool_choice": forced})
                assert accepted.status_code == 200, f"{path}: {accepted.text}"

    asyncio.run(main())


def test_calls_of_both_protocols_share_one_bound(tmp_path: Path) -> None:
    """When the limit of calls in progress is reached, HTTP gets 429, like gRPC."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=20), max_concurrent_requests=1) as stack:
            call = stack.generation.Generate(tokens_request(5, 6, max_tokens=FOREVER))
            await call.read()
            refused = await stack.http.post("/v1/completions", json=body(5))
            probe = await stack.http.get("/health")
            call.cancel()

            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert probe.status_code == 200

    asyncio.run(main())


def test_an_id_runs_once(tmp_path: Path) -> None:
    """A second request under the id of a live one is a conflict."""

    async def main() -> None:
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, limit=20)) as stack,
            open_stream(stack, request_id="same"),
        ):
            second = await stack.http.post("/v1/completions", json=body(5, request_id="same"))

            assert second.status_code == 409
            assert second.json()["error"]["code"] == "duplicate_request_id"

    asyncio.run(main())


def test_one_of_several_prompts_that_fails_ends_all(tmp_path: Path) -> None:
    """The error of one prompt is the answer, and the other prompts are cancelled."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=20)) as stack:
            request = body(max_tokens=FOREVER) | {"prompt": [[5, 6], [MODEL.vocab_size]]}
            response = await stack.http.post("/v1/completions", json=request)

            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt"

    asyncio.run(main())


def test_without_a_worker_requests_get_a_retry_delay(tmp_path: Path) -> None:
    """Before the first worker has joined no model is listed, and requests get 503 with Retry-After."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            models = await stack.http.get("/v1/models")
            refused = await stack.http.post("/v1/completions", json=body(5))

            assert models.json()["data"] == []
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"

    asyncio.run(main())


def test_a_stopping_front_end_finishes_what_it_has(tmp_path: Path) -> None:
    """Within the grace period a stream completes while new requests are refused with 503."""

    async def main() -> None:
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, limit=20), grace_period_s=30.0) as stack,
            open_stream(stack, max_tokens=40) as lines,
        ):
            stopping = asyncio.create_task(stack.stop())
            while (await stack.http.get("/ready")).status_code == 200:
                pass
            refused = await stack.http.post("/v1/completions", json=body(5))
            stack.core.limit = None
            told = await rest(lines)
            await stopping

            assert refused.status_code == 503
            assert told[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in told[-2]

    asyncio.run(main())


def test_streams_end_with_an_error_after_the_grace_period(tmp_path: Path) -> None:
    """A stream that is not done in time ends with an error event, not with a cut connection."""

    async def main() -> None:
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, limit=20), grace_period_s=0.1) as stack,
            open_stream(stack) as lines,
        ):
            await stack.stop()
            last, done = (await rest(lines))[-2:]

            assert '"code":"not_ready"' in last
            assert done == "data: [DONE]"

    asyncio.run(main())


def test_the_clients_trace_goes_on_to_the_core(tmp_path: Path) -> None:
    """A traceparent header is the parent of the server's span, whose own traceparent goes to the core."""

    async def main() -> None:
        telemetry = KeptTelemetry()
        async with running_stack(tmp_path, telemetry=telemetry) as stack:
            await stack.http.post("/v1/completions", json=body(5), headers=dict([TRACEPARENT]))
            (span,) = [span for span in telemetry.spans().values() if span.kind is SpanKind.SERVER]

            assert span.parent is not None
            assert format_span_id(span.parent.span_id) == PARENT_ID
            assert TRACE_ID in stack.core.submissions[0].traceparent

    asyncio.run(main())


def test_tokenize_and_detokenize_are_inverse(tmp_path: Path) -> None:
    """/tokenize and /detokenize are inverse; a conversation is rendered by the template."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            plain = (await stack.http.post("/tokenize", json={"prompt": "the fox", "add_special_tokens": False})).json()
            back = (await stack.http.post("/detokenize", json={"tokens": plain["tokens"]})).json()
            messages = [{"role": "user", "content": "hello"}]
            chat = (await stack.http.post("/tokenize", json={"messages": messages})).json()
            rendered = (await stack.http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
            neither = await stack.http.post("/tokenize", json={})

            assert back == {"prompt": "the fox"}
            assert plain["count"] == len(plain["tokens"])
            assert plain["max_model_len"] == MODEL.max_model_len
            assert rendered["prompt"].endswith("user: hello\nassistant:")
            assert neither.status_code == 400

    asyncio.run(main())


def test_unknown_paths_and_methods(tmp_path: Path) -> None:
    """An unknown path gets an error in OpenAI's form; the API describes itself completely."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            missing = await stack.http.get("/v1/nothing")
            method = await stack.http.get("/v1/completions")
            page = await stack.http.get("/docs")
            document = (await stack.http.get("/openapi.json")).json()
            text = json.dumps(document)

            assert missing.status_code == 404
            assert "/v1/nothing" in missing.json()["error"]["message"]
            assert method.status_code == 405
            assert method.headers["allow"] == "POST"
            assert "openapi.json" in page.text
            assert "http://" not in page.text
            assert "https://" not in page.text
            for name in document["components"]["schemas"]:
                text = text.replace(f'"#/components/schemas/{name}"', "")
            assert "#/components" not in text
            assert set(document["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics"}

    asyncio.run(main())


def test_a_large_head_is_refused_however_it_arrives(tmp_path: Path) -> None:
    """A head of 70 KiB in one piece gets 431."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            response = await stack.http.get("/v1/models", headers={"x-large": "x" * (70 << 10)})
            assert response.status_code == 431
            assert (await stack.http.get("/v1/models")).status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("hosts", "text"),
    [("", "0 Host headers; send one"), ("Host: a\r\nHost: b\r\n", "2 Host headers; send one")],
)
def test_a_request_has_one_host(tmp_path: Path, hosts: str, text: str) -> None:
    """A request without a Host header or with two gets 400, as RFC 9112 requires."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.http.base_url.port)
            writer.write(f"GET /v1/models HTTP/1.1\r\n{hosts}\r\n".encode())
            answer = await reader.read()
            writer.close()

            assert answer.startswith(b"HTTP/1.1 400 ")
            assert text.encode() in answer

    asyncio.run(main())


def test_options_of_the_server_are_its_methods(tmp_path: Path) -> None:
    """`OPTIONS *` asks about the server and not about a path, so it is not a missing path."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.http.base_url.port)
            writer.write(b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = (await reader.read()).lower()
            writer.close()

            assert answer.startswith(b"http/1.1 204 ")
            assert b"allow: get, head, post, delete, options" in answer

    asyncio.run(main())


def test_a_malformed_chunk_size_gets_400(tmp_path: Path) -> None:
    """The client sees the reason, although the endpoint waits for the body."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            reader, writer = await asyncio.open_connection("127.0.0.1", stack.http.base_url.port)
            writer.write(CHUNKED)
            writer.write(b"1\r\n{\r\n")
            await until_held(stack, 1)
            writer.write(b"-1\r\n{\r\n")
            answer = await reader.read()
            writer.close()

            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"check the method, the headers and the chunks" in answer
            assert (await stack.http.get("/v1/models")).status_code == 200

    asyncio.run(main())


@asynccontextmanager
async def incomplete(stack: Stack, head: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """Return the responses on a connection with this head and one byte of an endless body."""
    port = stack.http.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"1\r\n{\r\n")
    try:
        yield reader
    finally:
        writer.close()


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


async def until_held(stack: Stack, count: int) -> None:
    """Wait until so many bytes of unfinished bodies are counted."""
    line = f'quire_share_held{{frontend="frontend-0",resource="bytes of bodies"}} {count}.0'
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await stack.http.get("/metrics")).text:
            pass


def test_slow_bodies_do_not_take_the_calls_of_others(tmp_path: Path) -> None:
    """A call is counted when its body is complete; until then its bytes are counted."""

    async def main() -> None:
        async with running_stack(tmp_path, max_concurrent_requests=2) as stack, AsyncExitStack() as slow:
            for _ in range(8):
                await slow.enter_async_context(incomplete(stack, CHUNKED))
            await until_held(stack, 8)
            assert (await stack.http.post("/v1/completions", json=body(5))).status_code == 200
            await slow.aclose()
            await until_held(stack, 0)

    asyncio.run(main())


def test_bodies_that_are_being_received_are_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A principal whose unfinished bodies have half of the bytes gets 429 for more; small bodies of others pass."""
    monkeypatch.setattr(shares, "_MAX_BODY_BYTES", 1000)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            response = await stack.http.post("/v1/completions", content=b" " * 600, headers=JSON)
            assert response.status_code == 429
            assert response.json()["error"]["message"].startswith("bytes of bodies: your share of the limit of 1000")
            assert (await stack.http.post("/v1/completions", json=body(5))).status_code == 200

    asyncio.run(main())


def test_a_refused_client_cannot_hold_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection ends some seconds after a response that preceded the end of the body, even without credentials."""
    monkeypatch.setattr(server, "LINGER_S", 0.01)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            async with incomplete(stack, CHUNKED.replace(b"/v1/completions", b"/nowhere")) as answers:
                assert (await answers.read()).startswith(b"HTTP/1.1 404")
            async with incomplete(stack, CHUNKED.replace(b"application/json", b"text/plain")) as answers:
                assert (await answers.read()).startswith(b"HTTP/1.1 415")

    asyncio.run(main())


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond an address's share are closed at once; later ones are served when some have ended."""
    monkeypatch.setattr(frontend, "_max_connections", lambda: 9)

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            port = stack.http.base_url.port
            await stack.http.aclose()
            open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            reader, _ = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            for _, writer in open_ones:
                writer.close()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(PATIENCE_S):
                page = ""
                while not page:
                    with contextlib.suppress(httpx.TransportError):
                        page = (await client.get("/metrics")).text
            assert 'quire_share_refusals_total{frontend="frontend-0",resource="connections"}' in page
            assert 'quire_share_refusals_total{frontend="frontend-0",resource="connections"} 0.0' not in page

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_a_deadline_after_the_answer_changes_nothing(streams: bool) -> None:
    """A deadline that passes while the handler cleans up adds nothing to the complete answer, and aborts nothing."""
    sent: list[Message] = []
    aborted: list[bool] = []

    async def answers(exchange: Exchange) -> None:
        if streams:
            await exchange.event({"type": "last"})
            await exchange.end_events()
        else:
            await exchange.answer({"ok": True})
        await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        sent.append(message)

    async def main() -> None:
        principals = Principals("", anonymous_is_admin=False)
        endpoints = Endpoints(shares.make_shares(8, 8), lambda *_: None, principals)
        scope = {
            "type": "http",
            "path": "/v1/messages",
            "method": "POST",
            "headers": [(b"x-request-timeout", b"0.05")],
            server.ABORT_KEY: lambda: aborted.append(True),
        }
        await endpoints.endpoint("/v1/messages", answers, MESSAGES)(scope, receive, send)

    asyncio.run(main())

    assert sent[0]["type"] == "http.response.start"
    assert [message.get("more_body", False) for message in sent[1:]] == ([True, False] if streams else [False])
    assert not aborted
