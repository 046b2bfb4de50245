"""Prompts and clients for end-to-end tests: many token-id requests at once through real gRPC."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from quire import AsyncClient, Finished
from shared.config import WorkerConfig
from worker_svc.memory.kv_pool import block_bytes
from worker_svc.model.loader import load_model


@dataclass(slots=True)
class Answer:
    """One request and its response."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    finished: Finished | None = None


def draw_prompts(lengths: Sequence[int], vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Random token ids of the given lengths; the first 16 ids (special tokens) are left out."""
    rng = random.Random(seed)
    return [[rng.randrange(16, vocab_size) for _ in range(length)] for length in lengths]


async def generate(client: AsyncClient, answer: Answer) -> None:
    """Read one request's stream to the end; check that deltas arrive without gaps or repetitions."""
    stream = client.generate(
        token_ids=answer.prompt, max_tokens=answer.max_tokens, temperature=0, ignore_eos=True, timeout=240
    )
    async for delta in stream:
        assert delta.first_index == len(answer.tokens), "a gap or a repeat"
        answer.tokens.extend(delta.token_ids)
    answer.finished = stream.finished


def generate_all(target: str, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[Answer]:
    """All requests at once; returns their answers."""
    answers = [Answer(prompt, count) for prompt, count in zip(prompts, max_tokens, strict=True)]

    async def run() -> None:
        async with AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
            for answer in answers:
                tasks.create_task(generate(client, answer))

    asyncio.run(run())
    return answers


def kv_memory(checkpoint: Path, *, num_blocks: int, block_size: int, num_states: int = 0) -> str:
    """Return the `--kv-cache-memory` that holds so many blocks of a float32 cache, and so many recurrent states."""
    model, _ = load_model(WorkerConfig(model=str(checkpoint), device="cpu", dtype="float32"), torch.device("cpu"))
    return str(block_bytes(model.kv_shapes, block_size, torch.float32) * num_blocks + num_states * model.state_bytes)
