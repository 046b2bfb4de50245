"""Lost clients, cores and messages: each message is sent exactly once, and clients notice nothing."""

import asyncio
import functools
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
from grpc import aio

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.errors import InternalError
from services.link import core_link
from services.requests.scheduling import MAX_TIME_S
from services.streams.stream import Stream, StreamRequest
from services.text.detokenizer import detokenizer_factory
from shared.columns import from_column, to_column
from shared.frames import MAX_SERVED_SEQUENCE
from shared.request_spec import RequestSpec
from tests.services.stack import (
    MODEL,
    PATIENCE_S,
    Stack,
    TestCore,
    joined_ids,
    joined_text,
    running_stack,
    tokens_request,
)
from tests.services.tokenizers_for_tests import byte_level

PROMPT = tuple(byte_level().encode("one two 🙂 three ", add_special_tokens=False).ids)


Call: TypeAlias = "aio.UnaryStreamCall[v1.GenerateRequest, v1.GenerateResponse]"


async def replace_core(stack: Stack, **options: Any) -> TestCore:
    """Kills the core as kill -9 would, and starts another one at the same address."""
    address = stack.core.address
    stack.core.kill()
    stack.core_or_none = TestCore(address, **options)
    return stack.core


async def next_response(call: Call) -> v1.GenerateResponse:
    """The next message, which must come."""
    async with asyncio.timeout(PATIENCE_S):
        response = await call.read()
    assert isinstance(response, v1.GenerateResponse)
    return response


async def collect(call: Call) -> list[v1.GenerateResponse]:
    """What is left of an answer."""
    responses = []
    async with asyncio.timeout(PATIENCE_S):
        while isinstance(response := await call.read(), v1.GenerateResponse):
            responses.append(response)
    return responses


def _request(request_id: str, priority: int = 0) -> StreamRequest:
    spec = RequestSpec(request_id=request_id, num_prompt_tokens=len(PROMPT), max_tokens=3, priority=priority, model="f")
    return StreamRequest(spec=spec, prompt=to_column(PROMPT), credit=64, arrival=0.0)


def test_a_cancelled_call_is_cancelled_at_the_core_once(tmp_path: Path) -> None:
    """The core gets the cancellation at once and exactly once, and for no other stream."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=2)) as stack:
            calls = [
                stack.generation.Generate(tokens_request(*PROMPT, max_tokens=9, request_id=name)) for name in "abc"
            ]
            for call in calls:
                await call.read()
            calls[1].cancel()
            await stack.core.saw(lambda core: bool(core.cancelled))
            (stream,) = [s.stream for s in stack.core.submissions if s.request_id == "b"]
            # Two more reports would reveal a second, wrong cancellation.
            reports = sum(message.HasField("report") for message in stack.core.messages)
            await stack.core.saw(lambda c: sum(m.HasField("report") for m in c.messages) >= reports + 2)

            assert [from_column(column).tolist() for column in stack.core.cancelled] == [[stream]]

    asyncio.run(main())


def test_a_finished_call_is_not_cancelled(tmp_path: Path) -> None:
    """If the core itself ended the stream, it gets no further message about it."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            await stack.generate(tokens_request(*PROMPT))
            await stack.http.get("/metrics")  # This sends one more message to the core.

            assert stack.core.cancelled == []

    asyncio.run(main())


def test_the_deadline_goes_to_the_core_and_ends_the_call(tmp_path: Path) -> None:
    """The core gets the remaining time; after it, the client gets DEADLINE_EXCEEDED and the core a cancellation."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=1)) as stack:
            call = stack.generation.Generate(tokens_request(*PROMPT), timeout=1.0)
            with pytest.raises(aio.AioRpcError) as error:
                await collect(call)
            await stack.core.saw(lambda core: bool(core.cancelled))

            (submission,) = stack.core.submissions
            assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            # gRPC rounds timeouts up when it sends them.
            assert 0 < submission.deadline_ns < 1_200_000_000
            assert [from_column(column).tolist() for column in stack.core.cancelled] == [[submission.stream]]

    asyncio.run(main())


def test_a_deadline_beyond_the_largest_value_is_served(tmp_path: Path) -> None:
    """A deadline centuries ahead is far away for the core too, and nothing else."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            responses = await collect(stack.generation.Generate(tokens_request(*PROMPT, max_tokens=3), timeout=5e9))

            assert joined_ids([response.delta for response in responses[:-1]]) == list(PROMPT[:3])
            assert stack.core.submissions[0].deadline_ns == MAX_TIME_S * 10**9

    asyncio.run(main())


def test_a_submission_says_everything_the_core_must_know(tmp_path: Path) -> None:
    """Tokens, limits, stop tokens, credit and principal are those of the request."""

    async def main() -> None:
        async with running_stack(tmp_path, stream_credit=1024) as stack:
            request = tokens_request(*PROMPT, max_tokens=7, request_id="mine")
            request.stop.stop_token_ids.append(17)
            request.scheduling.priority, request.scheduling.tenant = -3, "team"
            request.scheduling.ttft_target.FromSeconds(5)
            await stack.generate(request)

            (submission,) = stack.core.submissions
            assert submission.request_id == "mine"
            assert from_column(submission.token_ids).tolist() == list(PROMPT)
            assert (submission.num_prompt_tokens, submission.max_tokens) == (len(PROMPT), 7)
            assert from_column(submission.stop_token_ids).tolist() == [2, 17]
            assert (submission.credit, submission.deadline_ns) == (1024, 0)
            assert submission.traceparent == ""
            assert (submission.priority, submission.tenant) == (-3, "team")
            assert 0 < submission.ttft_target_ns <= 5 * 10**9
            assert submission.total_time_target_ns == 0
            assert submission.cache_scope == b"principal\0anonymous"

    asyncio.run(main())


def test_a_core_without_workers_is_asked_to_wait_for_one(tmp_path: Path) -> None:
    """Before any worker has joined, requests are refused; once a model is known, a new core without a worker gets them.

    The core decides how long they wait. Readiness waits for the worker.
    """

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            stack.core_or_none = TestCore(f"ipc://{tmp_path}/core", model=None)
            await stack.core.saw(lambda core: any(message.HasField("report") for message in core.messages))
            with pytest.raises(aio.AioRpcError) as never:
                await stack.generate(tokens_request(*PROMPT))
            await replace_core(stack)
            await stack.until_ready()
            core = await replace_core(stack, limit=0, model=None)
            await stack.until_ready(False)
            await core.saw(lambda core: any(message.HasField("report") for message in core.messages))
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=3))
            await core.saw(lambda core: len(core.submissions) == 1)
            core.limit = None
            responses = await collect(call)

            assert never.value.code() == grpc.StatusCode.UNAVAILABLE
            assert joined_ids([response.delta for response in responses[:-1]]) == list(PROMPT[:3])

    asyncio.run(main())


def test_a_new_core_gets_live_requests_marked_as_accepted(tmp_path: Path) -> None:
    """A first submission is a new request; the next core receives each live request marked as accepted, with its model.

    This holds with and without tokens. A request that the core has refused is not submitted again.
    """

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=2)) as stack:
            begun = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=8, request_id="begun"))
            await next_response(begun)
            stack.core.limit = 0
            waiting = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=8, request_id="waiting"))
            await stack.core.saw(lambda core: len(core.submissions) == 2)
            stack.core.end_at_once = link_pb2.StreamEnd(reason=link_pb2.END_REASON_QUEUE_FULL, retry_ms=50)
            with pytest.raises(aio.AioRpcError):
                await stack.generate(tokens_request(*PROMPT, request_id="refused"))
            first = stack.core.submissions
            core = await replace_core(stack)
            await collect(begun)
            await collect(waiting)
            await stack.generate(tokens_request(*PROMPT, max_tokens=2, request_id="new"))

            assert [(s.request_id, s.again, s.accepted) for s in first] == [
                ("begun", False, False),
                ("waiting", False, False),
                ("refused", False, False),
            ]
            assert [(s.request_id, s.again, s.accepted) for s in core.submissions] == [
                ("begun", True, True),
                ("waiting", True, True),
                ("new", False, False),
            ]
            assert {s.model for s in (*first, *core.submissions)} == {MODEL.fingerprint}

    asyncio.run(main())


def test_a_request_that_no_core_has_seen_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a core, requests wait for one, which gets each of them for the first time."""

    async def main() -> None:
        monkeypatch.setattr(core_link, "SILENCE_TIMEOUT_S", 0.3)
        monkeypatch.setattr(core_link, "REPORT_EVERY_S", 0.1)
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=1)) as stack:
            begun = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=8, request_id="begun"))
            await next_response(begun)
            address, link = stack.core.address, stack.frontend.link
            stack.core.kill()
            stack.core_or_none = None
            await stack.until_ready(False)
            ended = asyncio.Event()
            link.submit(Stream(_request("late"), detokenizer_factory(byte_level())(True), ended.set))
            stack.core_or_none = core = TestCore(address)
            await collect(begun)
            await core.saw(lambda core: len(core.submissions) == 2)

            assert {s.request_id: (s.again, s.accepted) for s in core.submissions} == {
                "begun": (True, True),
                "late": (False, False),
            }

    asyncio.run(main())


def test_an_unsent_submission_is_not_marked_as_accepted(tmp_path: Path) -> None:
    """Submissions that the link still holds at a restart are new to the next core."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=0)) as stack:
            link = stack.frontend.link
            stack.core.kill()
            streams = []
            for name in ("sent", "held"):
                streams.append(Stream(_request(name), detokenizer_factory(byte_level())(True), lambda: None))
                link.submit(streams[-1])
                if name == "sent":
                    link._outgoing.take()  # The frame was sent, but the core may not have received it.
            link._begin_handshake()
            stack.core_or_none = core = TestCore(stack.core.address)
            await core.saw(lambda core: len(core.submissions) == 2)

            assert {s.request_id: s.accepted for s in core.submissions} == {"sent": True, "held": False}

    asyncio.run(main())


@pytest.mark.parametrize("stop", [(), ("never there",)])
def test_a_new_core_continues_every_stream(tmp_path: Path, stop: tuple[str, ...]) -> None:
    """Streams are resubmitted with the delivered tokens; clients get every token once and see only a pause."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=5)) as stack:
            calls = [stack.generation.Generate(tokens_request(*PROMPT, max_tokens=n, stop=stop)) for n in (20, 30)]
            first = [await next_response(call) for call in calls]
            core = await replace_core(stack)
            rest = [await collect(call) for call in calls]

            for n, begin, responses in zip((20, 30), first, rest, strict=True):
                deltas = [begin.delta, *(response.delta for response in responses[:-1])]
                expected = (list(PROMPT) * n)[:n]
                assert joined_ids(deltas) == expected
                assert joined_text(deltas) == byte_level().decode(expected)
                assert responses[-1].finished.usage.completion_tokens == n
            assert len(core.submissions) == 2
            assert all(s.num_prompt_tokens == len(PROMPT) for s in core.submissions)

    asyncio.run(main())


def test_a_stream_that_cannot_be_submitted_ends_alone(tmp_path: Path) -> None:
    """When the core is back and one of the waiting streams does not fit the link, it fails and the others run."""

    async def main() -> None:
        async with running_stack(tmp_path, core=None) as stack:
            detokenizer = detokenizer_factory(byte_level())
            streams = []
            for priority in (0, 1 << 40, 0):
                ended = asyncio.Event()
                streams.append((Stream(_request("r", priority), detokenizer(True), ended.set), ended))
            for stream, _ in streams:
                stack.frontend.link.submit(stream)
            stack.core_or_none = TestCore(f"ipc://{tmp_path}/core")
            async with asyncio.timeout(PATIENCE_S):
                for stream, news in streams:
                    while not stream.over:
                        news.clear()
                        await news.wait()

            assert [stream.num_generated for stream, _ in streams] == [3, 0, 3]
            assert [isinstance(stream.error, InternalError) for stream, _ in streams] == [False, True, False]

    asyncio.run(main())


def test_a_match_survives_a_lost_core(tmp_path: Path) -> None:
    """If the core dies before it gets a stop match, the new core gets it."""

    async def main() -> None:
        class Deaf(TestCore):
            def handle(self, peer: bytes, message: link_pb2.FrontendMessage) -> None:
                del message.stop_matches[:]
                super().handle(peer, message)

        text = byte_level().decode(list(PROMPT))
        async with running_stack(tmp_path, core=lambda a: Deaf(a, limit=8)) as stack:
            stop = text[8:12]
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=99, stop=(stop,)))
            responses: list[v1.GenerateResponse] = []
            while joined_text([response.delta for response in responses]) != text[:8]:
                responses.append(await next_response(call))
            await replace_core(stack)
            responses += await collect(call)

            assert joined_text([response.delta for response in responses[:-1]]) == text[:8]
            assert responses[-1].finished.stop_string == stop

    asyncio.run(main())


def test_a_front_end_says_hello_to_a_core_that_lost_it(tmp_path: Path) -> None:
    """After an expired lease, the front end submits its streams again under the same incarnation."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=3)) as stack:
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=12))
            first = await next_response(call)
            stack.core.forget_frontends.set()
            await stack.core.saw(lambda core: len(core.submissions) == 2)
            stack.core.limit = None
            rest = await collect(call)

            deltas = [first.delta, *(response.delta for response in rest[:-1])]
            assert joined_ids(deltas) == (list(PROMPT) * 12)[:12]
            hellos = [message.hello for message in stack.core.messages if message.HasField("hello")]
            assert len({hello.incarnation for hello in hellos}) == 1
            assert [submission.accepted for submission in stack.core.submissions] == [False, True]

    asyncio.run(main())


def test_missing_tokens_make_the_stream_a_new_one(tmp_path: Path) -> None:
    """After a gap, the old number is cancelled and a new one submitted; the client sees no gap."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            stack.core.skew = 3
            deltas, _ = await stack.generate(tokens_request(*PROMPT, max_tokens=12))

            assert joined_ids(deltas) == (list(PROMPT) * 12)[:12]
            old, new = stack.core.submissions
            assert old.stream != new.stream
            assert (old.accepted, new.accepted) == (False, True)
            assert [from_column(column).tolist() for column in stack.core.cancelled] == [[old.stream]]

    asyncio.run(main())


def test_tokens_sent_again_are_ignored(tmp_path: Path) -> None:
    """A new core that repeats tokens the stream has does not make the client see them twice."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=6)) as stack:
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=12))
            responses: list[v1.GenerateResponse] = []
            while len(joined_ids([response.delta for response in responses])) < 6:
                responses.append(await next_response(call))
            core = await replace_core(stack)
            core.skew = -2
            responses += await collect(call)

            assert joined_ids([response.delta for response in responses[:-1]]) == (list(PROMPT) * 12)[:12]

    asyncio.run(main())


def test_a_lost_core_makes_the_service_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the core is silent, the service is not ready and new calls are UNAVAILABLE; with a new core both recover."""

    async def main() -> None:
        monkeypatch.setattr(core_link, "SILENCE_TIMEOUT_S", 0.3)
        monkeypatch.setattr(core_link, "REPORT_EVERY_S", 0.1)
        async with running_stack(tmp_path) as stack:
            address = stack.core.address
            stack.core.kill()
            stack.core_or_none = None
            await stack.until_ready(False)
            ready = await stack.http.get("/ready")
            with pytest.raises(aio.AioRpcError) as error:
                await stack.generate(tokens_request(*PROMPT))
            stack.core_or_none = TestCore(address)
            await stack.until_ready()
            deltas, _ = await stack.generate(tokens_request(*PROMPT, max_tokens=3))

            assert ready.status_code == 503
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert joined_ids(deltas) == list(PROMPT[:3])

    asyncio.run(main())


def test_a_core_that_dies_is_noticed_by_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream goes on with the next core although the front end waits for neither silence nor its next report."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=2)) as stack:
            monkeypatch.setattr(core_link, "SILENCE_TIMEOUT_S", 1e6)
            monkeypatch.setattr(core_link.CoreLink, "_tick", lambda self, now: None)
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=6))
            await next_response(call)
            await replace_core(stack)
            responses = await collect(call)

            assert responses[-1].finished.usage.completion_tokens == 6
            assert [s.accepted for s in stack.core.submissions] == [True]

    asyncio.run(main())


def test_a_request_that_arrives_between_two_cores_goes_to_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives while the scheduler is being replaced is not refused but submitted to the next one."""

    async def main() -> None:
        greeting, greet = asyncio.Event(), core_link.CoreLink._begin_handshake

        def noted(link: core_link.CoreLink) -> None:
            greet(link)
            greeting.set()

        async with running_stack(tmp_path) as stack:
            monkeypatch.setattr(core_link.CoreLink, "_begin_handshake", noted)
            await stack.generate(tokens_request(*PROMPT, max_tokens=1))
            address = stack.core.address
            stack.core.kill()
            stack.core_or_none = None
            await asyncio.wait_for(greeting.wait(), PATIENCE_S)
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=3))
            stack.core_or_none = TestCore(address)
            responses = await collect(call)

            assert responses[-1].finished.usage.completion_tokens == 3
            assert [s.accepted for s in stack.core.submissions] == [False]

    asyncio.run(main())


def test_a_core_that_states_its_state_has_taken_the_refusal_back(tmp_path: Path) -> None:
    """A refused front end accepts requests again once the core sends its state, with or without a Hello."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            make = functools.partial(link_pb2.CoreMessage, incarnation=stack.core.incarnation)
            stack.core.say(make(refused="too many front ends").SerializeToString())
            await stack.until_ready(False)
            stack.core.say(make(state=link_pb2.ServiceState(ready=True, model=MODEL)).SerializeToString())
            await stack.until_ready()
            deltas, _ = await stack.generate(tokens_request(*PROMPT, max_tokens=3))

            assert joined_ids(deltas) == list(PROMPT[:3])

    asyncio.run(main())


def test_a_link_that_went_dead_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the core lives but no longer hears this connection, a new incarnation continues the streams."""

    class HardOfHearing(TestCore):
        deaf = False
        deaf_to: bytes | None = None

        def handle(self, peer: bytes, message: link_pb2.FrontendMessage) -> None:
            if self.deaf:
                self.deaf_to = self.deaf_to or peer
            if peer == self.deaf_to:
                self._frontends.pop(peer, None)
                self.limit = None
            else:
                super().handle(peer, message)

    async def main() -> None:
        monkeypatch.setattr(core_link, "SILENCE_TIMEOUT_S", 0.3)
        monkeypatch.setattr(core_link, "REPORT_EVERY_S", 0.1)
        async with running_stack(tmp_path, core=lambda a: HardOfHearing(a, limit=3)) as stack:
            call = stack.generation.Generate(tokens_request(*PROMPT, max_tokens=12))
            first = await next_response(call)
            assert isinstance(stack.core, HardOfHearing)
            stack.core.deaf = True
            rest = await collect(call)

            deltas = [first.delta, *(response.delta for response in rest[:-1])]
            assert joined_ids(deltas) == (list(PROMPT) * 12)[:12]
            hellos = [message.hello for message in stack.core.messages if message.HasField("hello")]
            assert len({hello.incarnation for hello in hellos}) >= 2

    asyncio.run(main())


def test_streams_do_not_wait_for_ever_for_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no core comes back for long enough, live calls end UNAVAILABLE."""

    async def main() -> None:
        monkeypatch.setattr(core_link, "SILENCE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(core_link, "GIVE_UP_S", 0.5)
        monkeypatch.setattr(core_link, "REPORT_EVERY_S", 0.1)
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=1)) as stack:
            call = stack.generation.Generate(tokens_request(*PROMPT))
            await call.read()
            stack.core.kill()
            stack.core_or_none = None
            with pytest.raises(aio.AioRpcError) as error:
                await collect(call)

            assert error.value.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(main())


def test_malformed_messages_are_dropped(tmp_path: Path) -> None:
    """Whatever a broken core sends is counted and dropped; the streams go on."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            incarnation, one, index = stack.core.incarnation, b"\1\0\0\0", b"\0\0\0\0"
            broken = [
                link_pb2.CoreMessage(incarnation=incarnation, streams=b"\1\0\0"),
                link_pb2.CoreMessage(incarnation=incarnation, streams=one),
                link_pb2.CoreMessage(incarnation=incarnation, streams=one, first_indices=index),
                link_pb2.CoreMessage(incarnation=incarnation, streams=one, first_indices=index, counts=b"\xff" * 4),
            ]
            for payload in (b"\xff\xff\xff", *(message.SerializeToString() for message in broken)):
                stack.core.say(payload)
            deltas, _ = await stack.generate(tokens_request(*PROMPT, max_tokens=3))

            assert joined_ids(deltas) == list(PROMPT[:3])
            assert stack.frontend.link.malformed_messages == 5

    asyncio.run(main())


def test_a_front_end_that_shuts_down_says_goodbye(tmp_path: Path) -> None:
    """The goodbye is its last message to the core."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, limit=1)) as stack:
            call = stack.generation.Generate(tokens_request(*PROMPT))
            await call.read()
            await stack.stop()
            await stack.core.saw(lambda core: core.messages[-1].goodbye)

            assert [message.goodbye for message in stack.core.messages].count(True) == 1
            assert stack.core.cancelled

    asyncio.run(main())


def test_a_log_that_no_frame_would_take_is_refused_by_its_field(tmp_path: Path) -> None:
    """A resumable request is refused on arrival if its retained log-probabilities would not fit into a frame."""
    model = link_pb2.ServedModel()
    model.CopyFrom(MODEL)
    model.max_model_len = MAX_SERVED_SEQUENCE

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda a: TestCore(a, model=model)) as stack:
            request = tokens_request(*PROMPT, max_tokens=100_000, request_id="r")
            request.resumable = True
            request.output.logprobs = 20
            with pytest.raises(aio.AioRpcError, match=r"output\.logprobs: 20 for each of 100000 tokens") as error:
                await stack.generate(request)
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())
