"""Streams that never cease: so many at once, each replaced by a new one when it ends, every token timed and checked."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import torch

from kernels.philox import gumbel_from_words, random_words
from quire import AsyncClient, Finished
from quire.errors import QuireError
from tests.e2e.oracle import NEAR_TIE, Oracle, Tally

TEMPERATURE = 0.8


@dataclass(slots=True)
class Streamed:
    """One request, what came back, and when."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    seed: int | None
    """None: greedy."""
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Of each delta, by `time.time()`."""
    finished: Finished | None = None
    error: QuireError | None = None

    def next_token_after(self, moment: float) -> float | None:
        """When the next token after a moment came; None when none was to come."""
        return next((each for each in self.times if each > moment), None)


@dataclass(slots=True)
class Load:
    """So many streams at once against one target."""

    target: str
    num_streams: int
    vocab_size: int
    max_tokens: int
    seed: int
    longest_prompt: int = 200
    done: list[Streamed] = field(default_factory=list)
    live: dict[str, Streamed] = field(default_factory=dict)
    flows: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first token of all."""
    _stopping: bool = False

    async def run(self) -> None:
        """Runs until `stop`, and then until every stream has ended."""
        rng = random.Random(self.seed)
        async with AsyncClient(self.target) as client, asyncio.TaskGroup() as tasks:
            for index in range(self.num_streams):
                tasks.create_task(self._one_after_another(client, index, random.Random(rng.random())))

    def stop(self) -> None:
        """No new streams."""
        self._stopping = True

    async def _one_after_another(self, client: AsyncClient, index: int, rng: random.Random) -> None:
        number = 0
        while not self._stopping or not number:
            prompt = [rng.randrange(16, self.vocab_size) for _ in range(rng.randrange(2, self.longest_prompt))]
            seed = rng.getrandbits(63) if rng.random() < 0.5 else None
            streamed = Streamed(f"chaos-{index}-{number}", prompt, self.max_tokens, seed)
            self.live[streamed.request_id] = streamed
            await self._stream(client, streamed)
            del self.live[streamed.request_id]
            self.done.append(streamed)
            number += 1

    async def _stream(self, client: AsyncClient, streamed: Streamed) -> None:
        generation = client.generate(
            token_ids=streamed.prompt,
            max_tokens=streamed.max_tokens,
            temperature=0.0 if streamed.seed is None else TEMPERATURE,
            ignore_eos=True,
            request_id=streamed.request_id,
            timeout=600,
            seed=streamed.seed or 0,
        )
        try:
            async for delta in generation:
                assert delta.first_index == len(streamed.tokens), f"{streamed.request_id}: a gap or a repeat"
                streamed.tokens.extend(delta.token_ids)
                streamed.times.append(time.time())
                self.flows.set()
        except QuireError as error:
            streamed.error = error
            return
        streamed.finished = generation.finished


def check(oracle: Oracle, streamed: Streamed, tally: Tally) -> None:
    """Asserts that a stream ended in full, with the reference's pick after each delivered prefix (teacher-forced)."""
    assert streamed.error is None, f"{streamed.request_id}: {streamed.error!r}"
    assert len(streamed.tokens) == streamed.max_tokens, streamed.request_id
    if streamed.seed is None:
        oracle.check_greedy(streamed.prompt, streamed.tokens, tally)
        return
    count = len(streamed.tokens)
    with torch.inference_mode():
        logits = oracle.model(torch.tensor([[*streamed.prompt, *streamed.tokens]])).logits[0]
    positions = torch.arange(len(streamed.prompt), len(streamed.prompt) + count, dtype=torch.int32)
    words = random_words(
        torch.full((count,), streamed.seed, dtype=torch.int64),
        positions,
        torch.zeros(count, dtype=torch.int32),
        logits.shape[1],
    )
    scores = logits[len(streamed.prompt) - 1 : -1].float() / TEMPERATURE + gumbel_from_words(words)
    chosen = scores[torch.arange(count), torch.tensor(streamed.tokens)]
    gaps = scores.max(dim=-1).values - chosen
    tally.tokens += count
    near = (gaps > 0) & (gaps <= NEAR_TIE / TEMPERATURE)
    tally.near_ties += int(near.sum())
    wrong = torch.nonzero(gaps > NEAR_TIE / TEMPERATURE).flatten().tolist()
    assert not wrong, f"{streamed.request_id}: tokens {wrong[:5]} of {count} are not the seeded draw"
