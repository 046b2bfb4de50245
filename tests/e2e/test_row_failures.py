"""Row failures in real processes: the client gets the reason, and neighbours that share its prefix are unaffected."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from measure.testbed.checkpoints import VOCAB_SIZE, make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient
from quire.errors import InvalidRequestError, QuireError

PREFIX = list(range(100, 164))
NUM_NEIGHBOURS = 4
MAX_TOKENS = 400
POISON = 99
"""A token whose embedding is not a number."""


class Neighbours:
    """Streams with the same prompt prefix, which run one after another while other requests fail."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._begun = [asyncio.Event() for _ in range(NUM_NEIGHBOURS)]
        self._over = False
        self.preemptions: list[int] = []
        """Of the streams that have finished."""

    async def run(self, number: int) -> None:
        """Run streams until `end`; each delivers all of its tokens."""
        while not self._over:
            stream = self._client.generate(
                token_ids=[*PREFIX, number],
                max_tokens=MAX_TOKENS,
                temperature=0,
                ignore_eos=True,
                banned_token_ids=[POISON],
                timeout=240,
            )
            count = 0
            async for delta in stream:
                count += len(delta.token_ids)
                self._begun[number].set()
            assert stream.finished is not None
            assert count == MAX_TOKENS
            self.preemptions.append(stream.finished.usage.preemptions)

    def end(self) -> None:
        """Begin no further streams."""
        self._over = True

    async def have_begun(self) -> None:
        """Every stream has a token."""
        for begun in self._begun:
            await begun.wait()


def test_contradictory_constraints_end_their_own_request_only(demo: Served) -> None:
    """A grammar that contradicts the allowed tokens ends only its own request, with INVALID_ARGUMENT (400 in HTTP).

    The error names the field and the remedy. Streams that share its prefix are not preempted.
    """
    tokenizer = Tokenizer.from_file("shared/demo_model/tokenizer.json")
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())}
    without_digits = [token for token, text in texts.items() if text and set(text) <= set("ab-")]

    async def main(grpc: str, http: str) -> Neighbours:
        async with (
            AsyncClient(grpc) as client,
            httpx.AsyncClient(base_url=f"http://{http}", trust_env=False) as web,
            asyncio.TaskGroup() as tasks,
        ):
            neighbours = Neighbours(client)
            for number in range(NUM_NEIGHBOURS):
                tasks.create_task(neighbours.run(number))
            await neighbours.have_begun()
            for _ in range(3):
                stuck = client.generate(
                    token_ids=[*PREFIX, 7],
                    max_tokens=50,
                    regex=r"[ab]{6}-\d{4}",
                    allowed_token_ids=without_digits,
                    timeout=240,
                )
                with pytest.raises(InvalidRequestError) as caught:
                    async for _ in stuck:
                        pass
                (violation,) = caught.value.violations
                assert violation.field == "grammar"
                assert "together with allowed_token_ids; relax one of them" in violation.description
            answer = await web.post(
                "/v1/completions",
                json={
                    "model": "demo",
                    "prompt": [*PREFIX, 7],
                    "guided_regex": r"[ab]{6}-\d{4}",
                    "allowed_token_ids": without_digits,
                },
            )
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "guided_regex"
            neighbours.end()
        return neighbours

    neighbours = asyncio.run(main(demo.grpc, demo.http))
    demo.wait_until_empty()

    assert len(neighbours.preemptions) >= NUM_NEIGHBOURS
    assert not any(neighbours.preemptions)


def test_nan_ends_its_own_request_only(tmp_path: Path) -> None:
    """A prompt that makes the model return NaN ends with ROW_FAILED after a second attempt that shares nothing.

    Streams that share its prefix, and got their tokens in the same steps, are not preempted.
    """
    folder = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert max(PREFIX) < VOCAB_SIZE

    async def main(grpc: str) -> Neighbours:
        async with AsyncClient(grpc) as client, asyncio.TaskGroup() as tasks:
            neighbours = Neighbours(client)
            for number in range(NUM_NEIGHBOURS):
                tasks.create_task(neighbours.run(number))
            await neighbours.have_begun()
            for _ in range(3):
                with pytest.raises(QuireError) as caught:
                    await anext(client.generate(token_ids=[*PREFIX, 1, POISON], max_tokens=5, timeout=240))
                assert caught.value.reason == "ROW_FAILED"
            neighbours.end()
        return neighbours

    with serve(folder, "--dtype=float32") as served:
        neighbours = asyncio.run(main(served.grpc))
        served.wait_until_empty()
        kinds = [json.loads(line).get("kind") for line in served.log.read_text().splitlines() if '"row failed"' in line]

    assert len(neighbours.preemptions) >= NUM_NEIGHBOURS
    assert not any(neighbours.preemptions)
    assert set(kinds) == {"not_finite"}
