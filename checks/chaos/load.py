"""Continuous load with a fixed number of streams.

Each is replaced when it ends, and every token is timed and checked.
"""

import asyncio
import contextlib
import json
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from grpc import aio

from checks.chaos import constrained
from checks.oracle import NEAR_TIE, Oracle, Tally
from kernels.philox import gumbel_from_words, random_words
from quire import AsyncClient, Finished, FinishReason
from quire.admin.v1 import admin_pb2
from quire.admin.v1.admin_pb2_grpc import AdminServiceStub
from quire.errors import QueueFullError, QuireError

if TYPE_CHECKING:
    from quire.admin.v1.admin_pb2_grpc import AdminServiceAsyncStub

TEMPERATURE = 0.8
_MOST_CALLS = 20
"""Maximum number of retries after the server has refused a call temporarily."""


@dataclass(slots=True)
class Streamed:
    """One request with its response and times."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    seed: int | None
    """Sampling seed; None for greedy."""
    schema: dict[str, Any] | None = None
    """Output schema, which also determines where the output ends."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Arrival time of each delta, from `time.time()`."""
    story: list[tuple[float, str]] = field(default_factory=list)
    """Events in the scheduler, with times from `time.time()`; only for interrupted streams."""
    finished: Finished | None = None
    error: QuireError | None = None

    def next_token_after(self, moment: float) -> float | None:
        """Return when the next token after a given time arrived; None if none was due."""
        return next((each for each in self.times if each > moment), None)


@dataclass(slots=True)
class Load:
    """A fixed number of concurrent streams against one target."""

    target: str
    num_streams: int
    vocab_size: int
    max_tokens: int
    seed: int
    longest_prompt: int = 200
    resumable: bool = False
    """Whether clients resume their streams after losing the connection."""
    connections: int = 1
    """Number of connections that the streams share. Each connection leads to one front end."""
    constrained_share: float = 0.3
    """Share of streams with a JSON schema."""
    turns: int = 1
    """Number of requests in a conversation. Each extends the sequence of the one before."""
    done: list[Streamed] = field(default_factory=list)
    live: dict[str, Streamed] = field(default_factory=dict)
    refusals: int = 0
    """Calls that the server refused temporarily."""
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the first token arrives."""
    _stopping: bool = False

    async def run(self) -> None:
        """Run until `stop` is called and every stream has ended."""
        rng = random.Random(self.seed)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(self.target)) for _ in range(self.connections)]
            channel = await stack.enter_async_context(aio.insecure_channel(self.target))
            admin: AdminServiceAsyncStub = AdminServiceStub(channel)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            for index in range(self.num_streams):
                client = clients[index % len(clients)]
                tasks.create_task(self._one_after_another(client, admin, index, random.Random(rng.random())))

    def stop(self) -> None:
        """Start no new streams."""
        self._stopping = True

    async def _one_after_another(
        self, client: AsyncClient, admin: "AdminServiceAsyncStub", index: int, rng: random.Random
    ) -> None:
        number = 0
        history: list[int] = []
        while not self._stopping or not number:
            longest = self.longest_prompt // self.turns
            prompt = history + [rng.randrange(16, self.vocab_size) for _ in range(rng.randrange(2, longest))]
            seed = rng.getrandbits(63) if rng.random() < 0.5 else None
            streamed = Streamed(f"chaos-{index}-{number}", prompt, self.max_tokens, seed)
            if rng.random() < self.constrained_share:
                streamed.schema, streamed.max_tokens = constrained.draw_schema(rng), constrained.MAX_TOKENS
            self.live[streamed.request_id] = streamed
            await self._stream_once_accepted(client, streamed)
            del self.live[streamed.request_id]
            self.done.append(streamed)
            if streamed.finished is not None and streamed.finished.usage.preemptions:
                streamed.story = await _story(admin, streamed.request_id)
            number += 1
            history = [*prompt, *streamed.tokens] if number % self.turns else []

    async def _stream_once_accepted(self, client: AsyncClient, streamed: Streamed) -> None:
        """Run a stream. Retry while the server temporarily refuses it at the start."""
        await self._stream(client, streamed)
        for _ in range(_MOST_CALLS):
            error = streamed.error
            if not isinstance(error, QueueFullError) or streamed.tokens or error.retry_after_s is None:
                return
            self.refusals += 1
            streamed.error = None
            await asyncio.sleep(error.retry_after_s)
            await self._stream(client, streamed)

    async def _stream(self, client: AsyncClient, streamed: Streamed) -> None:
        generation = client.generate(
            token_ids=streamed.prompt,
            max_tokens=streamed.max_tokens,
            temperature=0.0 if streamed.seed is None else TEMPERATURE,
            ignore_eos=streamed.schema is None,
            json_schema=json.dumps(streamed.schema) if streamed.schema is not None else False,
            request_id=streamed.request_id,
            timeout=600,
            seed=streamed.seed or 0,
            resumable=self.resumable,
        )
        try:
            async for delta in generation:
                assert delta.first_index == len(streamed.tokens), f"{streamed.request_id}: a gap or a repeat"
                streamed.tokens.extend(delta.token_ids)
                streamed.text += delta.text
                streamed.times.append(time.time())
                self.flows.set()
        except QuireError as error:
            streamed.error = error
            return
        streamed.finished = generation.finished


async def _story(admin: "AdminServiceAsyncStub", request_id: str) -> list[tuple[float, str]]:
    """Return the scheduler's history of a request; empty if the scheduler has dropped it."""
    try:
        answer = await admin.GetStory(admin_pb2.GetStoryRequest(request_id=request_id), timeout=60)
    except aio.AioRpcError:
        return []
    return [(event.time.ToNanoseconds() / 1e9, event.what) for story in answer.stories for event in story.events]


def check(oracle: Oracle, streamed: Streamed, tally: Tally) -> None:
    """Assert that a stream is complete and each token is the reference's choice (teacher-forced).

    In a constrained stream, the reference chooses among the tokens that the schema allows, and the text must conform.
    """
    assert streamed.error is None, f"{streamed.request_id}: {streamed.error!r}"
    tokens = streamed.tokens
    if streamed.schema is None:
        assert len(tokens) == streamed.max_tokens, streamed.request_id
    else:
        assert streamed.finished is not None
        assert streamed.finished.reason is FinishReason.STOP, streamed.request_id
        constrained.check_text(streamed.schema, streamed.text)
        tokens = [*tokens, *oracle.eos_token_ids[:1]]
    count = len(tokens)
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([[*streamed.prompt, *tokens]])).logits[0]
    scores = logits[len(streamed.prompt) - 1 : -1].float()
    near_tie = NEAR_TIE
    if streamed.seed is not None:
        scores, near_tie = scores / TEMPERATURE + _noise(streamed, count, oracle.vocab_size), NEAR_TIE / TEMPERATURE
    if streamed.schema is not None:
        scores = scores.where(constrained.masks(oracle, streamed.schema, streamed.tokens), -torch.inf)
    gaps = scores.max(dim=-1).values - scores[torch.arange(count), torch.tensor(tokens)]
    tally.tokens += count
    tally.near_ties += int(((gaps > 0) & (gaps <= near_tie)).sum())
    wrong = torch.nonzero(gaps > near_tie).flatten().tolist()
    assert not wrong, f"{streamed.request_id}: tokens {wrong[:5]} of {count} are not the reference's pick"


def _noise(streamed: Streamed, count: int, vocab_size: int) -> torch.Tensor:
    """Return `[count, vocab_size]`: the noise that a seeded request adds to its scaled logits."""
    assert streamed.seed is not None
    first = len(streamed.prompt)
    words = random_words(
        torch.full((count,), streamed.seed, dtype=torch.int64),
        torch.arange(first, first + count, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32),
        vocab_size,
    )
    return gumbel_from_words(words)
