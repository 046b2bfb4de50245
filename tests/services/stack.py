"""A real front end on real sockets in the test's event loop, connected to an echo core in a thread."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from measure.frontend.echo_core import EchoCore, EchoFrontend, EchoStream
from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from services.frontend import Frontend
from services.parsers import model_format
from services.text.tokenizer import load_tokenizer
from shared.config import FrontendConfig
from shared.sockets import send_to
from shared.telemetry import Telemetry
from tests.services.tokenizers_for_tests import EOS, byte_level, write_model

MODEL = link_pb2.ServedModel(
    name="echo",
    architecture="EchoForCausalLM",
    max_model_len=4096,
    vocab_size=byte_level().get_vocab_size(),
    eos_token_ids=[EOS],
    dtype="none",
    fingerprint="f" * 64,
)
PLAIN = model_format("plain", "", {})
"""The format of a model without reasoning and tool calls."""
PATIENCE_S = 20.0
"""An awaited event that has not come by then never will."""


class TestCore(EchoCore):
    """An echo core that records its messages and can misbehave on demand."""

    __test__ = False

    def __init__(
        self,
        address: str,
        *,
        limit: int | None = None,
        tokens_per_step: int = 1,
        model: link_pb2.ServedModel | None = MODEL,
    ) -> None:
        """`limit` is the maximum number of tokens per stream; `model` is None before a worker has joined."""
        super().__init__(address, model, tokens_per_step=tokens_per_step)
        self.limit = limit
        self.messages: list[link_pb2.FrontendMessage] = []
        self.end_at_once: link_pb2.StreamEnd | None = None
        """Every submission gets this end, except those in messages recorded before it was set."""
        self._present_end: link_pb2.StreamEnd | None = None
        """The end for the submissions of the present message."""
        self.operator_error: link_pb2.OperatorError | None = None
        """Every operator call is answered with this error."""
        self.answers_operators = True
        self.skew = 0
        """Added once to the index of the next stream's first token."""
        self.forget_frontends = threading.Event()
        """Makes the core lose its front ends, as when a lease runs out."""
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._sayings: list[bytes] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def handle(self, peer: bytes, message: link_pb2.FrontendMessage) -> None:
        """Keeps the message."""
        if self.forget_frontends.is_set():
            self.forget_frontends.clear()
            self._frontends.clear()
        self._present_end = self.end_at_once
        # Record before the response is sent, so that a test that sees the response also sees the message.
        self._loop.call_soon_threadsafe(self._keep, message)
        super().handle(peer, message)

    def submit(self, frontend: EchoFrontend, submission: link_pb2.Submission, answer: link_pb2.CoreMessage) -> None:
        """Takes, refuses or garbles a request."""
        if self._present_end is not None:
            end = answer.ends.add()
            end.CopyFrom(self._present_end)
            end.stream = submission.stream
            return
        super().submit(frontend, submission, answer)
        frontend.streams[submission.stream].sent += self.skew
        self.skew = 0

    def operate(self, reply: link_pb2.OperatorReply) -> None:
        """Report the error, if there is one; without answers, the reply belongs to no request."""
        if not self.answers_operators:
            reply.number = 0
        if self.operator_error is None:
            super().operate(reply)
        else:
            reply.error.CopyFrom(self.operator_error)

    def allowance(self, stream: EchoStream) -> int:
        """Respects the limit."""
        allowance = super().allowance(stream)
        return allowance if self.limit is None else max(min(allowance, self.limit - stream.sent), 0)

    async def saw(self, enough: Callable[["TestCore"], bool]) -> None:
        """Wait until the recorded messages are enough."""
        async with asyncio.timeout(PATIENCE_S):
            while not enough(self):
                self._news.clear()
                await self._news.wait()

    @property
    def submissions(self) -> list[link_pb2.Submission]:
        """All submissions so far."""
        return [submission for message in self.messages for submission in message.submissions]

    def reported(self, sample: str, **labels: str) -> float:
        """Return a value from a front end's newest report; 0 if it is missing."""
        reports = [message.report for message in self.messages if message.HasField("report")]
        for family in reports[-1].families if reports else ():
            for each in family.samples:
                if each.name == sample and labels.items() <= dict(each.labels).items():
                    return each.value
        return 0.0

    @property
    def cancelled(self) -> list[bytes]:
        """All columns of cancelled streams so far."""
        return [message.cancelled for message in self.messages if message.cancelled]

    def say(self, payload: bytes) -> None:
        """Sends bytes to every front end before the next step."""
        self._sayings.append(payload)

    @property
    def unsaid(self) -> int:
        """Number of payloads that `say` has not sent yet."""
        return len(self._sayings)

    def kill(self) -> None:
        """Ends like a process that was killed."""
        self._stop.set()
        self._thread.join()
        self.close()

    def _keep(self, message: link_pb2.FrontendMessage) -> None:
        self.messages.append(message)
        self._news.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            while self._sayings:
                payload = self._sayings.pop(0)
                for peer in self._frontends:
                    send_to(self._socket, peer, payload)
            self.step(timeout_ms=5)


class Stack:
    """The front end, its core and a client."""

    def __init__(
        self, core: TestCore | None, frontend: Frontend, target: str, channel: aio.Channel, http: httpx.AsyncClient
    ) -> None:
        self.core_or_none = core
        self.frontend = frontend
        self.target = target
        self.channel = channel
        self.http = http
        self._stopping: asyncio.Task[None] | None = None
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)

    @property
    def core(self) -> TestCore:
        """The core, which must be there."""
        assert self.core_or_none is not None
        return self.core_or_none

    async def generate(self, request: v1.GenerateRequest) -> tuple[list[v1.Delta], v1.Finished]:
        """The whole answer."""
        responses = [response async for response in self.generation.Generate(request)]
        assert responses[-1].HasField("finished")
        assert all(response.HasField("delta") for response in responses[:-1])
        return [response.delta for response in responses[:-1]], responses[-1].finished

    async def stop(self) -> None:
        """Stops the front end, as a signal would."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self.frontend.stop())
        await asyncio.shield(self._stopping)

    async def until_ready(self, ready: bool = True) -> None:
        """Wait until the front end reports that it is, or is not, ready."""
        expected = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        async with asyncio.timeout(PATIENCE_S):
            watch = health_pb2_grpc.HealthStub(self.channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
            async for response in watch:
                if response.status == expected:
                    watch.cancel()
                    return


@contextlib.asynccontextmanager
async def running_stack(
    folder: Path,
    *,
    core: Callable[[str], TestCore] | None = TestCore,
    telemetry: Telemetry | None = None,
    chat_template: bool = True,
    tokenizer: Tokenizer | None = None,
    **settings: Any,
) -> AsyncIterator[Stack]:
    """Start everything with these front end settings; ready unless there is no core."""
    model = write_model(
        folder / "model", tokenizer or byte_level(), **({} if chat_template else {"chat_template": None})
    )
    address = f"ipc://{folder}/core"
    config = FrontendConfig(
        frontend_address=address, model=str(model), grpc_port=0, http_port=0,
        **{"grace_period_s": 0.0, "default_max_tokens": 64} | settings,
    )  # fmt: skip
    started = core(address) if core is not None else None
    loaded = load_tokenizer(model, max_bytes=config.max_tokenizing_bytes)
    frontend = Frontend(config, loaded, telemetry or Telemetry("test"))
    grpc_port, http_port = await frontend.start()
    target = f"127.0.0.1:{grpc_port}"
    channel = aio.insecure_channel(target)
    http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}")
    stack = Stack(started, frontend, target, channel, http)
    try:
        if started is not None:
            await stack.until_ready()
        yield stack
    finally:
        await channel.close()
        await http.aclose()
        await stack.stop()
        if stack.core_or_none is not None:
            stack.core_or_none.kill()


def tokens_request(
    *ids: int, max_tokens: int = 16, stop: tuple[str, ...] = (), request_id: str = ""
) -> v1.GenerateRequest:
    """A request to which the echo core responds with its own prompt, over and over."""
    return v1.GenerateRequest(
        request_id=request_id,
        token_ids=v1.TokenIds(ids=ids),
        stop=v1.StopOptions(max_tokens=max_tokens, stop_strings=stop),
    )


def joined_ids(deltas: list[v1.Delta]) -> list[int]:
    """All token ids of an answer."""
    return [token_id for delta in deltas for token_id in delta.token_ids]


def joined_text(deltas: list[v1.Delta]) -> str:
    """All text of an answer."""
    return "".join(delta.text for delta in deltas)
