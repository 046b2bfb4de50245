"""Embeddings at the front end: prompts go to the core as requests that pool, vectors come out in both protocols."""

import asyncio
import struct
from base64 import b64decode
from pathlib import Path

import grpc
import pytest
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from quire_server.scrape import parse
from services.calls.embeddings import MAX_IN_PROGRESS
from shared.columns import from_column
from tests.services.stack import MODEL, TestCore, running_stack

VECTOR = struct.pack("<2f", 3.0, -4.0)


def embedding_core(address: str) -> TestCore:
    """A core that ends every request with the same vector."""
    model = link_pb2.ServedModel()
    model.CopyFrom(MODEL)
    model.hidden_size = 2
    core = TestCore(address, model=model)
    core.end_at_once = link_pb2.StreamEnd(reason=link_pb2.END_REASON_EMBEDDED, embedding=VECTOR, cached_prompt_tokens=1)
    return core


def test_prompts_are_requests_that_pool(tmp_path: Path) -> None:
    """Each input becomes a request with the call's pooling, and the vectors are scaled unless the call declines it.

    Usage is the sum. A call with more inputs than may be in progress is answered in order.
    """

    async def main() -> None:
        async with running_stack(tmp_path, core=embedding_core) as stack:
            inputs = [v1.EmbedInput(token_ids=v1.TokenIds(ids=[1, 2, 3 + i % 5])) for i in range(MAX_IN_PROGRESS + 9)]
            scaled = await stack.generation.Embed(v1.EmbedRequest(inputs=inputs, request_id="mine"))
            raw = await stack.generation.Embed(
                v1.EmbedRequest(
                    inputs=inputs[:1], pooling=v1.POOLING_MEAN, omit_normalization=True, truncate_prompt_tokens=2
                )
            )
            submissions = stack.core.submissions
            longer = {"model": "echo", "input": [5] * (MODEL.max_model_len + 1), "truncate_prompt_tokens": -1}
            await stack.http.post("/v1/embeddings", json=longer)
            assert stack.core.submissions[-1].num_prompt_tokens == MODEL.max_model_len - 1

        assert [list(each.values) for each in scaled.embeddings] == [pytest.approx([0.6, -0.8])] * len(inputs)
        assert (scaled.request_id, scaled.model) == ("mine", "echo")
        assert (scaled.usage.prompt_tokens, scaled.usage.cached_prompt_tokens) == (3 * len(inputs), len(inputs))
        assert list(raw.embeddings[0].values) == [3.0, -4.0]
        assert {(s.pooling, s.max_tokens, s.request_id) for s in submissions[:-1]} == {
            (plan_pb2.POOLING_LAST, 1, "mine")
        }
        assert submissions[-1].pooling == plan_pb2.POOLING_MEAN
        assert from_column(submissions[-1].token_ids).tolist() == [2, 3]

    asyncio.run(main())


def test_the_prompts_of_an_embedding_count_for_its_tenant(tmp_path: Path) -> None:
    """A tenant's prompt tokens include all its calls of any kind."""

    async def main() -> None:
        async with running_stack(tmp_path, core=embedding_core) as stack:
            request = v1.EmbedRequest(inputs=[v1.EmbedInput(token_ids=v1.TokenIds(ids=[1, 2, 3]))] * 2)
            request.scheduling.tenant = "search"
            await stack.generation.Embed(request)
            scrape = parse((await stack.http.get("/metrics")).text)

            assert scrape.sum("quire_tenant_tokens_total", tenant="search", kind="prompt") == 6
            assert scrape.sum("vllm:prompt_tokens_total") == 6

    asyncio.run(main())


def test_a_router_gets_an_embedding(tmp_path: Path) -> None:
    """In vLLM's router protocol, a prompt's vector comes with its size and its token count."""

    async def main() -> None:
        async with running_stack(tmp_path, core=embedding_core) as stack:
            engine = pb_grpc.VllmEngineStub(stack.channel)
            answer = await engine.Embed(pb.EmbedRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[1, 2])))
            assert [each.request_id for each in stack.core.submissions] == ["r"]

        assert list(answer.embedding) == pytest.approx([0.6, -0.8])
        assert (answer.embedding_dim, answer.prompt_tokens) == (2, 2)

    asyncio.run(main())


def test_http_gives_them_as_openai_does(tmp_path: Path) -> None:
    """As numbers or as base64 of little-endian float32, with usage; dimensions only if they equal the model's."""

    async def main() -> None:
        async with running_stack(tmp_path, core=embedding_core) as stack:
            answers = []
            for options in (
                {},
                {"encoding_format": "base64", "normalize": False},
                {"dimensions": 2},
                {"dimensions": 3},
            ):
                body = {"input": ["the fox", "a dog"], "model": "echo", **options}
                answers.append(await stack.http.post("/v1/embeddings", json=body))

        plain, encoded, fits, wrong = (answer.json() for answer in answers)
        assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
        assert (plain["object"], plain["model"]) == ("list", "echo")
        assert [(each["object"], each["index"]) for each in plain["data"]] == [("embedding", 0), ("embedding", 1)]
        assert plain["data"][1]["embedding"] == pytest.approx([0.6, -0.8])
        assert plain["usage"]["prompt_tokens"] == plain["usage"]["total_tokens"] > 0
        assert b64decode(encoded["data"][0]["embedding"]) == VECTOR
        assert fits["data"] == plain["data"]
        assert wrong["error"]["param"] == "dimensions"

    asyncio.run(main())


def test_a_model_without_hidden_states_says_so(tmp_path: Path) -> None:
    """UNIMPLEMENTED, and 400 in HTTP, before anything is computed; a failing prompt ends the call with its reason."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = v1.EmbedRequest(inputs=[v1.EmbedInput(text="the fox")])
            with pytest.raises(aio.AioRpcError) as unable:
                await stack.generation.Embed(request)
            answer = await stack.http.post("/v1/embeddings", json={"input": "the fox"})
            assert not stack.core.submissions

        assert unable.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert answer.status_code == 400
        assert "no hidden states" in answer.json()["error"]["message"]

    asyncio.run(main())


def test_one_failure_ends_the_call(tmp_path: Path) -> None:
    """If one prompt fails, the call returns no vector; the others are cancelled."""

    async def main() -> None:
        async with running_stack(tmp_path, core=embedding_core) as stack:
            stack.core.end_at_once = link_pb2.StreamEnd(reason=link_pb2.END_REASON_ROW_FAILED, message="NaN")
            with pytest.raises(aio.AioRpcError) as failed:
                await stack.generation.Embed(v1.EmbedRequest(inputs=[v1.EmbedInput(text="the fox")] * 3))
            assert not stack.frontend.link._streams

        assert failed.value.code() is grpc.StatusCode.INTERNAL

    asyncio.run(main())
