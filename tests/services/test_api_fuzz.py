"""Mutated requests of every call at the gRPC API: no crash, no leak, no stream that hangs."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc import aio

from measure.frontend.echo_core import EchoFrontend, EchoStream
from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from quire.v1 import model_pb2
from shared.columns import from_column
from tests.examples import FACTOR
from tests.services.stack import PATIENCE_S, Stack, TestCore, joined_ids, running_stack, tokens_request
from tests.services.tokenizers_for_tests import byte_level

NUM_REQUESTS = 300 if FACTOR == 1 else 1000 * FACTOR
"""`make fuzz` sends 100,000."""
AT_A_TIME = 48
MESSAGES = 4
"""Messages that are read before a client leaves."""
SERVICE = "/quire.v1.GenerationService/"
FOX = byte_level().encode("the fox ", add_special_tokens=False).ids
EXPECTED = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED,
}  # fmt: skip


class FuzzCore(TestCore):
    """An echo core that knows nothing of interrupted requests."""

    def handle(self, peer: bytes, message: link_pb2.FrontendMessage) -> None:
        """Handle a client that detaches: end its stream and keep nothing."""
        message.cancelled += message.detached
        super().handle(peer, message)
        self.messages.clear()
        if message.resume_questions:
            answer = link_pb2.CoreMessage(incarnation=self.incarnation)
            for question in message.resume_questions:
                answer.resume_replies.add(number=question.number, not_found=True)
            self._frontends[peer].backlog.append(answer.SerializeToString())

    def submit(self, frontend: EchoFrontend, submission: link_pb2.Submission, answer: link_pb2.CoreMessage) -> None:
        """Accept the request; refuse what a real core would refuse."""
        assert 0 < submission.num_prompt_tokens <= len(from_column(submission.token_ids))
        assert submission.max_tokens > 0
        super().submit(frontend, submission, answer)

    @property
    def streams(self) -> list[EchoStream]:
        """All live streams."""
        return [stream for frontend in list(self._frontends.values()) for stream in list(frontend.streams.values())]


def seeds() -> list[tuple[str, str, Message]]:
    """(shape, method, a sensible request) for every call."""
    full = v1.GenerateRequest(
        request_id="id",
        chat=v1.ChatInput(
            messages=[v1.ChatMessage(role="user", content="hi", tool_calls_json='[{"id":"x"}]')],
            tools_json='[{"type":"function","function":{"name":"f"}}]',
            template_variables_json='{"a":1}',
        ),
        sampling=v1.SamplingOptions(
            temperature=0.7, top_k=5, top_p=0.9, n=2, seed=1, typical_p=0.9, repetition_penalty=1.1,
            logit_bias={3: 1.0}, banned_token_ids=[4], allowed_token_ids=[5, 6], bad_words=["bad", "worse"],
        ),
        stop=v1.StopOptions(max_tokens=9, stop_strings=["fox", "zz"], stop_token_ids=[7], min_tokens=1),
        output=v1.OutputOptions(logprobs=2, echo=True, truncate_prompt_tokens=50),
        scheduling=v1.SchedulingOptions(priority=3, tenant="t", expected_output_tokens=5, cache_scope="c"),
    )  # fmt: skip
    resumable = tokens_request(*FOX, max_tokens=30, request_id="again")
    resumable.resumable = True
    grammars = [
        v1.Grammar(json_schema='{"type":"object","properties":{"a":{"enum":[1,2]}}}'),
        v1.Grammar(regex="[a-z]{2,4}|x+"),
        v1.Grammar(ebnf='start: "a" b*\nb: /[0-9]/'),
        v1.Grammar(choice=v1.ChoiceGrammar(choices=["a", "b"])),
    ]
    constrained = [
        v1.GenerateRequest(text="the fox", grammar=grammar, stop=v1.StopOptions(max_tokens=5)) for grammar in grammars
    ]
    generate = [full, resumable, tokens_request(*FOX, max_tokens=20), v1.GenerateRequest(text="the fox"), *constrained]
    return [
        *(("stream", f"{SERVICE}Generate", request) for request in generate),
        *(("unary", f"{SERVICE}GenerateOnce", v1.GenerateOnceRequest(request=request)) for request in generate),
        *(("batch", f"{SERVICE}GenerateBatch", v1.GenerateBatchRequest(key=5, request=each)) for each in generate),
        ("batch", f"{SERVICE}GenerateBatch", v1.GenerateBatchRequest(key=5, cancel=True)),
        ("stream", f"{SERVICE}Resume", v1.ResumeRequest(request_id="again", from_tokens=[3], from_text_bytes=[7])),
        ("unary", f"{SERVICE}Cancel", v1.CancelRequest(request_id="again")),
        ("unary", f"{SERVICE}Tokenize", v1.TokenizeRequest(text="the fox")),
        ("unary", f"{SERVICE}Tokenize", v1.TokenizeRequest(chat=full.chat)),
        ("unary", f"{SERVICE}Detokenize", v1.DetokenizeRequest(token_ids=FOX)),
        ("unary", f"{SERVICE}Embed", v1.EmbedRequest(inputs=[v1.EmbedInput(text="x")])),
        ("unary", "/quire.v1.ModelService/GetModel", model_pb2.GetModelRequest(name="echo")),
        ("unary", "/quire.v1.ModelService/ListModels", model_pb2.ListModelsRequest()),
    ]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, lost, added, repeated or moved; or none."""
    mutated = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        where = rng.randrange(len(mutated) + 1)
        end = min(len(mutated), where + rng.choice((1, 1, 2, 8)))
        match rng.randrange(6):
            case 0 if where < len(mutated):
                mutated[where] ^= 1 << rng.randrange(8)
            case 1 if where < len(mutated):
                mutated[where] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del mutated[where:end]
            case 3:
                mutated[where:where] = rng.randbytes(rng.choice((1, 2, 9)))
            case 4:
                mutated[where:where] = mutated[where:end] * rng.choice((1, 2, 50))
            case 5:
                del mutated[where:]
    return bytes(mutated)


def _raw(method: Any) -> Any:
    """A method that takes and gives bytes."""
    return method


async def call_once(stack: Stack, rng: random.Random, shape: str, method: str, payload: bytes) -> grpc.StatusCode:
    """One call as a careless client makes it: it may leave after a few messages."""
    try:
        if shape == "unary":
            await _raw(stack.channel.unary_unary(method))(payload, timeout=PATIENCE_S)
            return grpc.StatusCode.OK
        call: Any
        if shape == "stream":
            call = _raw(stack.channel.unary_stream(method))(payload, timeout=PATIENCE_S)
        else:
            call = stack.channel.stream_stream(method)(timeout=PATIENCE_S)
            for each in (payload, mutate(rng, payload))[: rng.choice((1, 2))]:
                await call.write(each)
            await call.done_writing()
        for _ in range(MESSAGES):
            if await call.read() is aio.EOF:
                break
        else:
            call.cancel()
            return grpc.StatusCode.CANCELLED
        return grpc.StatusCode(await call.code())
    except aio.AioRpcError as error:
        return error.code()
    except (asyncio.InvalidStateError, aio.UsageError):  # The server ended the call before everything was written.
        return grpc.StatusCode(await call.code())


def test_mutated_requests_do_no_harm(tmp_path: Path) -> None:
    """Each mutated call ends in time with a defined status, never INTERNAL or UNKNOWN.

    Afterwards nothing of it is left in the front end or the core, and the front end still serves.
    """
    rng = random.Random(7)
    corpus = seeds()
    seen: dict[grpc.StatusCode, int] = {}

    async def main() -> None:
        async with running_stack(tmp_path, core=FuzzCore, default_max_tokens=20) as stack:
            tasks_before = len(asyncio.all_tasks())
            gate = asyncio.Semaphore(AT_A_TIME)

            async def one(shape: str, method: str, payload: bytes) -> None:
                try:
                    code = await call_once(stack, rng, shape, method, payload)
                finally:
                    gate.release()
                seen[code] = seen.get(code, 0) + 1
                assert code in EXPECTED, f"{code} for {method} with {payload!r}"

            async with asyncio.TaskGroup() as calls:
                for _ in range(NUM_REQUESTS):
                    await gate.acquire()
                    shape, method, request = rng.choice(corpus)
                    calls.create_task(one(shape, method, mutate(rng, request.SerializeToString())))

            core = stack.core
            assert isinstance(core, FuzzCore)
            async with asyncio.timeout(PATIENCE_S):
                await stack.frontend._live.idle.wait()
                await core.saw(lambda core: not core.streams if isinstance(core, FuzzCore) else False)
            assert not stack.frontend.link._streams
            assert not stack.frontend._live._live
            deltas, _ = await stack.generate(tokens_request(*FOX, max_tokens=9))
            assert joined_ids(deltas) == (FOX * 9)[:9]
            assert len(asyncio.all_tasks()) <= tasks_before + 2

    asyncio.run(main())
    assert seen[grpc.StatusCode.OK] > NUM_REQUESTS // 20, seen
    assert seen[grpc.StatusCode.INVALID_ARGUMENT] > NUM_REQUESTS // 20, seen
