"""Embeddings of a real service, by gRPC, by its clients and by the official `openai` package."""

import asyncio
import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
import torch
from transformers import AutoModel

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import Served, serve
from quire import AsyncClient, Client, errors
from quire.v1 import generation_pb2 as v1
from tests.e2e.load import draw_prompts

CHUNK = 32
"""Most tokens of a step: longer prompts are computed in chunks."""
Vector = npt.NDArray[np.float64]


class Oracle:
    """`transformers`' own last hidden states."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def vector(self, tokens: list[int], pooling: str) -> Vector:
        """The embedding, not scaled."""
        with torch.inference_mode():
            states = self._model(torch.tensor([tokens])).last_hidden_state[0].double()
        pooled: Vector = (states[-1] if pooling == "last" else states.mean(0)).numpy()
        return pooled


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Oracle:
    """Return the reference for its embeddings."""
    return Oracle(checkpoint)


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    """Yield one service for all tests that do not disturb it."""
    with serve(checkpoint, "--dtype=float32", f"--max-num-batched-tokens={CHUNK}", "--max-num-seqs=8") as served:
        yield served


@pytest.fixture
def openai_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield OpenAI's client for the service."""
    monkeypatch.setenv("NO_PROXY", "*")
    with openai.OpenAI(base_url=f"http://{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def close(got: Any, expected: Vector, *, normalized: bool = True) -> None:
    """Asserts that a vector is the oracle's."""
    scale = np.linalg.norm(expected) if normalized else 1.0
    np.testing.assert_allclose(np.asarray(got, np.float64), expected / scale, rtol=2e-3, atol=2e-3)


@pytest.mark.every(3)
def test_vectors_are_those_of_transformers_beside_streams(served: Served, oracle: Oracle) -> None:
    """Embeddings equal those of `transformers`, while streams run beside them and lose no token.

    Prompts have one token up to many chunks. The pooling is last or mean. In a second round the prefix cache is full.
    """
    prompts = draw_prompts([1, 5, 31, 32, 33, 100, 200], 256, seed=4)

    async def run() -> None:
        async with AsyncClient(served.grpc) as client:
            model = await client.get_model()
            streams = [
                asyncio.ensure_future(
                    client.generate(token_ids=prompt, max_tokens=60, temperature=0, ignore_eos=True).result()
                )
                for prompt in prompts[:4]
            ]
            for _ in range(2):
                last, mean = await asyncio.gather(
                    client.embed(prompts), client.embed(prompts, pooling="mean", normalize=False)
                )
                for prompt, of_last, of_mean in zip(prompts, last.vectors, mean.vectors, strict=True):
                    assert len(of_last) == len(of_mean) == model.embedding_size == 64
                    close(of_last, oracle.vector(prompt, "last"))
                    close(of_mean, oracle.vector(prompt, "mean"), normalized=False)
                assert last.usage.prompt_tokens == mean.usage.prompt_tokens == sum(map(len, prompts))
                assert mean.usage.cached_prompt_tokens == 0, "a mean needs every token computed"
            assert last.usage.cached_prompt_tokens > 0, "the last token's reads what is cached"
            assert [len((await stream).token_ids) for stream in streams] == [60] * 4

    asyncio.run(run())


def test_the_official_client_gets_embeddings(openai_client: Any, served: Served, oracle: Oracle) -> None:
    """A text, a list of texts, token ids and lists of them; as numbers and as base64, which the client asks for."""
    with Client(served.grpc) as client:
        tokens = [list(client.tokenize(text).token_ids) for text in ("hello world", "another text")]
    for given, expected in (
        ("hello world", tokens[:1]),
        (["hello world", "another text"], tokens),
        (tokens[0], tokens[:1]),
        (tokens, tokens),
    ):
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = openai_client.embeddings.create(model=served_name(openai_client), input=given, **options)
            assert [each.index for each in answer.data] == list(range(len(expected)))
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, expected))
            for each, prompt in zip(answer.data, expected, strict=True):
                vector = each.embedding
                if isinstance(vector, str):
                    vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
                close(vector, oracle.vector(prompt, "last"))
    mean = openai_client.embeddings.create(
        model="", input=tokens[0], extra_body={"pooling": "mean", "normalize": False, "truncate_prompt_tokens": 2}
    )
    close(mean.data[0].embedding, oracle.vector(tokens[0][-2:], "mean"), normalized=False)


def served_name(client: Any) -> str:
    """The name of the served model."""
    return str(client.models.list().data[0].id)


def test_an_invalid_request_is_named(served: Served) -> None:
    """By gRPC and HTTP alike: the field as its sender wrote it, and nothing of the call is computed."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1, 2], [999]]}, "input[1]"),
        ({"input": [1] * 5000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 7}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "stream": True}, "stream"),
        ({}, "input"),
    ]
    with httpx.Client(trust_env=False) as http:
        for body, param in cases:
            answer = http.post(f"http://{served.http}/v1/embeddings", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), body
        fits = http.post(f"http://{served.http}/v1/embeddings", json={"input": "a", "dimensions": 64})
        assert fits.status_code == 200
        other = http.post(f"http://{served.http}/v1/embeddings", json={"input": "a", "model": "other"})
        assert other.status_code == 404
    with Client(served.grpc) as client:
        for inputs, options, field in (
            ([], {}, "inputs"),
            (["a", ""], {}, "inputs[1].text"),
            ([[]], {}, "inputs[0].token_ids"),
            (["a"], {"pooling": "max"}, "pooling"),
            (["a"], {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
            ([[1] * 1024], {}, "inputs[0].token_ids"),
        ):
            with pytest.raises(errors.InvalidRequestError) as caught:
                client.embed(inputs, **options)
            assert [violation.field for violation in caught.value.violations] == [field]
        assert v1.Pooling.values() == [0, 1, 2]


@pytest.mark.every(3)
def test_a_worker_that_dies_costs_embeddings_a_pause(checkpoint: Path, oracle: Oracle) -> None:
    """After `kill -9` of the worker during a large call, every vector arrives once and is right."""
    prompts = draw_prompts([150] * 24, 256, seed=9)
    with serve(checkpoint, "--dtype=float32", f"--max-num-batched-tokens={CHUNK}", "--max-num-seqs=16") as served:

        async def run() -> tuple[tuple[float, ...], ...]:
            async with AsyncClient(served.grpc) as client:
                call = asyncio.ensure_future(client.embed(prompts, pooling="mean", timeout=240))
                while not served.metric("quire_requests_ended_total", reason="embedded"):
                    assert not call.done(), "it was over before the worker could be killed"
                    await asyncio.sleep(0)
                os.kill(served.pid("worker"), signal.SIGKILL)
                answer = await call
                assert answer.usage.preemptions > 0
                return answer.vectors

        vectors = asyncio.run(run())
        assert served.metric("quire_kv_blocks", state="held") == 0
    assert len(vectors) == len(prompts)
    for prompt, vector in zip(prompts, vectors, strict=True):
        close(vector, oracle.vector(prompt, "mean"))


def test_a_caller_that_leaves_takes_its_prompts_along(served: Served) -> None:
    """A passed deadline ends the call and all its prompts; nothing of the call remains in the service."""
    prompts = draw_prompts([900] * 60, 256, seed=1)
    with Client(served.grpc) as client:
        with pytest.raises(errors.DeadlineError):
            client.embed(prompts, pooling="mean", timeout=0.3)
        client.embed([[1, 2, 3]])
    served.wait_until_empty()
