"""What the blocking client promises, against a real gRPC server whose answers each test scripts."""

import math
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from opentelemetry import trace

from quire import Client, Delta, FinishReason, Model, SchedulingOptions, Timings, Tokenized, Usage, errors
from quire.v1 import generation_pb2 as pb
from tests.quire.scripted_server import ScriptedServer, delta, fail, finished, reason, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Yield a scripted server."""
    with scripted_server() as running:
        yield running


@pytest.fixture
def client(server: ScriptedServer) -> Iterator[Client]:
    """Yield a client of the server."""
    with Client(server.target) as connected:
        yield connected


def test_generate_yields_deltas_and_then_tells_how_it_ended(server: ScriptedServer, client: Client) -> None:
    """Each message becomes one typed delta, in order; `finished` is set only after the last one."""
    server.script = lambda _request, _context: [
        delta(0, [5, 6], "Hé"),
        delta(2, [], "l"),
        finished(
            pb.FINISH_REASON_STOP,
            stop_token_id=2,
            usage=pb.Usage(prompt_tokens=3, completion_tokens=4, cached_prompt_tokens=1, preemptions=2, energy_j=0.5),
            timings=pb.Timings(
                queued=Duration(nanos=500_000_000),
                first_token=Duration(seconds=1),
                total=Duration(seconds=2, nanos=250_000_000),
            ),
        ),
    ]

    generation = client.generate("text")
    first = next(generation)
    assert generation.finished is None
    rest = list(generation)

    assert first == Delta(0, 0, (5, 6), "Hé")
    assert rest == [Delta(0, 2, (), "l")]
    assert generation.finished is not None
    assert generation.finished.reason is FinishReason.STOP
    assert generation.finished.stop_token_id == 2
    assert generation.finished.stop_string is None
    assert generation.finished.usage == Usage(3, 4, 1, 2, 0.5)
    assert generation.finished.timings == Timings(0.5, 1.0, 2.25)
    assert (generation.finished.request_id, generation.finished.model) == ("r1", "demo")


def test_every_option_reaches_its_field(server: ScriptedServer, client: Client) -> None:
    """The server receives each field as the caller gave it."""
    client.generate(
        token_ids=[1, 2],
        model="m",
        max_tokens=7,
        temperature=0.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[9],
        ignore_eos=True,
        include_special_tokens=True,
        request_id="mine",
        scheduling=SchedulingOptions(
            priority=-7,
            tenant="team",
            expected_output_tokens=9,
            ttft_target_s=0.25,
            total_time_target_s=90,
            cache_scope="shared",
            request_class="batch",
            session_id="agent-7",
            ends_session=True,
            retention_s=60,
            retention_priority=2,
            expected_pause_s=1.5,
        ),
    ).result()

    assert server.requests == [
        pb.GenerateRequest(
            request_id="mine",
            model="m",
            token_ids=pb.TokenIds(ids=[1, 2]),
            sampling=pb.SamplingOptions(temperature=0.0, top_k=3, top_p=0.5, min_p=0.25, seed=2**64 - 1),
            stop=pb.StopOptions(max_tokens=7, stop_strings=["a", "b"], stop_token_ids=[9], ignore_eos=True),
            output=pb.OutputOptions(include_special_tokens=True),
            scheduling=pb.SchedulingOptions(
                priority=-7,
                tenant="team",
                expected_output_tokens=9,
                ttft_target=Duration(nanos=250_000_000),
                total_time_target=Duration(seconds=90),
                cache_scope="shared",
                request_class="batch",
                session_id="agent-7",
                ends_session=True,
                retention=Duration(seconds=60),
                retention_priority=2,
                expected_pause=Duration(seconds=1, nanos=500_000_000),
            ),
        )
    ]


def test_absent_options_stay_absent(server: ScriptedServer, client: Client) -> None:
    """The server's defaults hold for whatever the caller does not name."""
    client.generate("text").result()
    client.generate("text", scheduling=SchedulingOptions()).result()

    assert server.requests == [pb.GenerateRequest(text="text"), pb.GenerateRequest(text="text")]


def test_one_stop_string_may_be_given_as_a_string(server: ScriptedServer, client: Client) -> None:
    """`stop="END"` is one stop string, not three letters."""
    client.generate("text", stop="END").result()

    assert list(server.requests[0].stop.stop_strings) == ["END"]


def test_an_empty_prompt_is_the_servers_to_judge(server: ScriptedServer, client: Client) -> None:
    """An empty text and an empty list of ids are sent unchanged."""
    client.generate("").result()
    client.generate(token_ids=[]).result()

    assert [request.WhichOneof("input") for request in server.requests] == ["text", "token_ids"]


def test_messages_become_a_chat(server: ScriptedServer, client: Client) -> None:
    """A conversation is sent turn by turn, for the server's chat template."""
    client.generate(messages=[{"role": "system", "content": "s"}, {"role": "user", "content": ""}]).result()

    assert [(m.role, m.content) for m in server.requests[0].chat.messages] == [("system", "s"), ("user", "")]


def test_result_joins_what_the_stream_brought(server: ScriptedServer, client: Client) -> None:
    """`result` waits for the end and gives one answer."""
    server.script = lambda _request, _context: [delta(0, [1], "a"), delta(1, [2, 3], "bc"), finished()]

    completion = client.generate("text").result()

    assert (completion.text, completion.token_ids) == ("abc", (1, 2, 3))
    assert completion.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"top_k": 1.5}, "sampling.top_k"),
        ({"stop_token_ids": [-1]}, "stop.stop_token_ids"),
        ({"stop": [b"\xff"]}, "stop.stop_strings"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"scheduling": SchedulingOptions(priority=2**31)}, "scheduling.priority"),
        ({"scheduling": SchedulingOptions(expected_output_tokens=-1)}, "scheduling.expected_output_tokens"),
        ({"scheduling": SchedulingOptions(ttft_target_s=math.nan)}, "scheduling.ttft_target"),
        ({"scheduling": SchedulingOptions(total_time_target_s=math.inf)}, "scheduling.total_time_target"),
        ({"scheduling": SchedulingOptions(total_time_target_s=1e30)}, "scheduling.total_time_target"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused_by_name(
    client: Client, arguments: dict[str, object], field: str
) -> None:
    """The error is the one the server would give: INVALID_ARGUMENT, naming the field."""
    with pytest.raises(errors.InvalidRequestError) as caught:
        client.generate("text", **arguments)  # type: ignore[arg-type]

    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    "arguments",
    [{}, {"messages": [], "token_ids": []}, {"messages": [{"role": "user"}]}, {"token_ids": [-1]}],
)
def test_a_prompt_that_is_none_is_refused_before_it_is_sent(client: Client, arguments: dict[str, object]) -> None:
    """Neither no prompt, nor two, nor half a message, nor an impossible id reaches the server."""
    with pytest.raises(errors.InvalidRequestError):
        client.generate(**arguments)  # type: ignore[arg-type]


def test_text_that_is_no_unicode_is_refused(client: Client) -> None:
    """A lone surrogate, which Python makes of bytes that are not UTF-8, is an invalid request."""
    with pytest.raises(errors.InvalidRequestError, match="text"):
        client.generate("bad \udcff")


def test_a_target_of_no_time_is_the_servers_to_judge(server: ScriptedServer, client: Client) -> None:
    """A TTFT target of zero seconds is sent unchanged."""
    client.generate("text", scheduling=SchedulingOptions(ttft_target_s=0)).result()

    assert server.requests[0].scheduling.HasField("ttft_target")
    assert not server.requests[0].scheduling.HasField("total_time_target")


def test_nan_reaches_the_server(server: ScriptedServer, client: Client) -> None:
    """A temperature of NaN fits its field; the server must refuse it."""
    client.generate("text", temperature=math.nan).result()

    assert math.isnan(server.requests[0].sampling.temperature)


def test_a_refusal_becomes_a_typed_error_with_its_details(server: ScriptedServer, client: Client) -> None:
    """Reason, message, violations, metadata and retry hint of google.rpc.Status arrive in the exception."""
    server.script = lambda _request, context: fail(
        context,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the queue is full",
        reason("QUEUE_FULL", waiting="4096"),
        error_details_pb2.RetryInfo(retry_delay=Duration(seconds=1, nanos=500_000_000)),
    )

    with pytest.raises(errors.QueueFullError, match=r"^the queue is full$") as caught:
        client.generate("text").result()

    assert caught.value.reason == "QUEUE_FULL"
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert caught.value.retry_after_s == 1.5
    assert caught.value.metadata == {"waiting": "4096"}
    assert caught.value.from_server


def test_violations_name_the_fields(server: ScriptedServer, client: Client) -> None:
    """Each BadRequest violation becomes one FieldViolation."""
    violations = [
        error_details_pb2.BadRequest.FieldViolation(field="text", description="is empty"),
        error_details_pb2.BadRequest.FieldViolation(field="stop.max_tokens", description="is 0"),
    ]
    server.script = lambda _request, context: fail(
        context,
        grpc.StatusCode.INVALID_ARGUMENT,
        "text: is empty",
        reason("INVALID_REQUEST"),
        error_details_pb2.BadRequest(field_violations=violations),
    )

    with pytest.raises(errors.InvalidRequestError) as caught:
        next(client.generate("text"))

    assert caught.value.violations == (
        errors.FieldViolation("text", "is empty"),
        errors.FieldViolation("stop.max_tokens", "is 0"),
    )


def test_grpcs_own_pushback_is_a_retry_hint(server: ScriptedServer, client: Client) -> None:
    """A server that only sets grpc-retry-pushback-ms is understood too."""

    def script(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> list[pb.GenerateResponse]:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", "250"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return []

    server.script = script

    with pytest.raises(errors.QueueFullError) as caught:
        client.generate("text").result()

    assert caught.value.retry_after_s == 0.25
    assert not caught.value.from_server


def test_damaged_details_do_not_hide_the_error(server: ScriptedServer, client: Client) -> None:
    """An error whose details cannot be parsed still has its code and message."""

    def script(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> list[pb.GenerateResponse]:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "away")
        return []

    server.script = script

    with pytest.raises(errors.UnavailableError, match=r"^away$"):
        client.generate("text").result()


def test_a_stream_that_ends_without_its_final_message_is_an_error(server: ScriptedServer, client: Client) -> None:
    """Half an answer is never taken for a whole one."""
    server.script = lambda _request, _context: [delta(0, [1], "a")]

    with pytest.raises(errors.ServerError, match="final message"):
        client.generate("text").result()


def _endless(_request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    index = 0
    while context.is_active():
        yield delta(index, [1], "x")
        index += 1


def test_cancel_ends_the_call_on_both_sides(server: ScriptedServer, client: Client) -> None:
    """After `cancel` the server's call is over and the iteration raises CancelledError."""
    server.script = _endless
    generation = client.generate("text")
    next(generation)

    generation.cancel()

    assert server.cancelled.wait(30)
    with pytest.raises(errors.CancelledError):
        list(generation)


def test_leaving_the_with_block_cancels(server: ScriptedServer, client: Client) -> None:
    """A client that leaves a generation early leaves no work on the server."""
    server.script = _endless
    with client.generate("text") as generation:
        next(generation)

    assert server.cancelled.wait(30)


def test_dropping_a_generation_cancels(server: ScriptedServer, client: Client) -> None:
    """A client that drops a generation leaves no work on the server."""
    server.script = _endless
    for _ in client.generate("text"):
        break

    assert server.cancelled.wait(30)


def test_the_timeout_is_the_calls_deadline(server: ScriptedServer, client: Client) -> None:
    """The server sees the deadline, and its passing is a DeadlineError."""
    server.script = _endless

    with pytest.raises(errors.DeadlineError, match="the timeout passed") as failed:
        list(client.generate("text", timeout=0.2))
    assert failed.value.reason == "DEADLINE"

    assert server.deadlines[0] is not None
    assert server.deadlines[0] <= 0.4  # gRPC rounds up the remaining time.


def test_the_current_trace_context_travels_as_traceparent(server: ScriptedServer, client: Client) -> None:
    """A call's metadata contains the span that is current when the call starts; without a span, it contains none."""
    context = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(context)):
        client.generate("text").result()
        client.get_model()
    client.generate("text").result()

    expected = f"00-{0xABC:032x}-{0xDEF:016x}-01"
    assert [metadata.get("traceparent") for metadata in server.metadata] == [expected, expected, None]


def test_nobody_there_is_unavailable() -> None:
    """A refused connection is an UnavailableError that did not come from a server."""
    with Client("127.0.0.1:1") as client, pytest.raises(errors.UnavailableError) as caught:
        client.get_model()

    assert not caught.value.from_server


def _breaks_once(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
    """A script whose Generate breaks after a token; a Resume, which has no prompt, returns the rest."""
    if request.HasField("text"):
        yield delta(0, [1], "a")
        fail(context, grpc.StatusCode.UNAVAILABLE, "broken")
    yield delta(1, [2], "b")
    yield finished()


def test_a_resumable_generation_goes_on_after_a_break(server: ScriptedServer, client: Client) -> None:
    """The client resumes after the tokens that it has, and the output is complete."""
    server.script = _breaks_once

    assert client.generate("text", resumable=True, request_id="r").result().text == "ab"
    assert server.resumed == [pb.ResumeRequest(request_id="r", from_tokens=[1], from_text_bytes=[1])]


def test_resume_from_another_connection(server: ScriptedServer, client: Client) -> None:
    """`resume` requests the missing output and yields the deltas."""
    assert client.resume("r", from_tokens=[4]).result().text == "hi"
    assert server.resumed == [pb.ResumeRequest(request_id="r", from_tokens=[4])]


def test_a_cancelled_resumable_generation_is_dropped_by_the_server(server: ScriptedServer, client: Client) -> None:
    """If only the call ended, the server would keep the request, so the client also cancels it by id."""
    server.script = _endless
    with client.generate("text", resumable=True, request_id="left") as generation:
        next(generation)
    assert server.dropped.get(timeout=30) == "left"

    client.cancel("named")
    assert server.dropped.get(timeout=30) == "named"


def test_a_batch_brings_every_answer_with_its_key(server: ScriptedServer, client: Client) -> None:
    """Each request has an answer under its place in the list."""
    server.script = lambda request, _context: [delta(0, [1], request.text.upper()), finished()]

    answers = {
        answer.index: answer.completion for answer in client.generate_batch(["a", {"prompt": "b"}], max_tokens=3)
    }

    assert {index: answer.text for index, answer in answers.items() if answer is not None} == {0: "A", 1: "B"}


def test_a_request_that_cannot_be_sent_fails_alone(server: ScriptedServer, client: Client) -> None:
    """The result of an invalid request is at its place and has an error; the other requests are sent."""
    server.script = lambda request, _context: [delta(0, [1], request.text.upper()), finished()]
    requests = ["a", {"prompt": "b", "max_token": 1}, 5, {"prompt": "c", "max_tokens": -1}, {"prompt": "d"}]

    answers = {answer.index: answer for answer in client.generate_batch(requests)}  # type: ignore[arg-type]

    assert {index for index, answer in answers.items() if answer.completion is not None} == {0, 4}
    messages = {index: str(answer.error) for index, answer in answers.items() if answer.error is not None}
    assert messages == {
        1: "requests[1]: an unknown option 'max_token'; did you mean 'max_tokens'?",
        2: "requests[2]: must be a text or a dict of options, not int",
        3: "stop.max_tokens: -1 is out of range",
    }


@pytest.mark.parametrize("timeout", [-1, 0, float("nan"), float("inf"), True, "5"])
def test_a_timeout_is_a_positive_number(client: Client, timeout: Any) -> None:
    """Every call refuses another value by the name of the argument."""
    calls = (
        lambda: client.generate("a", timeout=timeout),
        lambda: client.generate_batch(["a"], timeout=timeout),
        lambda: client.resume("id", timeout=timeout),
        lambda: client.get_model(timeout=timeout),
    )
    for call in calls:
        with pytest.raises(errors.InvalidRequestError, match=r"^timeout: .* is not a positive number of seconds"):
            call()


def test_a_misspelt_option_is_named(client: Client) -> None:
    """The TypeError suggests the option that was probably meant."""
    with pytest.raises(TypeError, match=r"unknown option 'max_token'; did you mean 'max_tokens'\?"):
        client.generate("a", max_token=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unknown option 'xyzzy'; see quire\.GenerateOptions"):
        client.generate_batch(["a"], xyzzy=5)  # type: ignore[call-arg]


def test_tokenize_and_detokenize(client: Client) -> None:
    """Text and chats become ids, ids become text."""
    assert client.tokenize("ab") == Tokenized((97, 98), 512)
    assert client.tokenize("ab", add_special_tokens=False).token_ids == (98,)
    assert client.tokenize(messages=[{"role": "user", "content": "four"}]).token_ids == (4,)
    assert client.detokenize([104, 105]) == "hi"


def test_get_model(client: Client) -> None:
    """A model's description is typed; an unknown name is a ModelNotFoundError."""
    assert client.get_model() == Model("demo", "", 512, 300, (2,), "float32", False, "")
    with pytest.raises(errors.ModelNotFoundError, match="no such model"):
        client.get_model("other")
