"""The engine protocol of vLLM's routers, through its own generated stubs."""

import asyncio
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from tests.services.stack import MODEL, TestCore, running_stack
from tests.services.tokenizers_for_tests import byte_level

FOX = byte_level().encode("the fox ", add_special_tokens=False).ids


def request(**fields: Any) -> Any:
    """A tokenized request."""
    sampling = pb.SamplingParams(**({"max_tokens": 6} | fields.pop("sampling", {})))
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=FOX), sampling_params=sampling, **fields)


def test_a_router_gets_chunks_health_and_loads(tmp_path: Path) -> None:
    """A router gets chunks and final messages with tokens, reasons and counts, and health, model, server and loads.

    Unsupported fields are refused by name.
    """

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            engine = pb_grpc.VllmEngineStub(stack.channel)
            streamed = [each async for each in engine.Generate(request(request_id="r", stream=True))]
            whole = [each async for each in engine.Generate(request(sampling={"n": 2, "stop": ["fox"]}))]

            expected = (FOX * 6)[:6]
            assert [token for each in streamed[:-1] for token in each.chunk.token_ids] == expected
            complete = streamed[-1].complete
            assert (list(complete.output_ids), complete.finish_reason) == (expected, "length")
            assert (complete.prompt_tokens, complete.completion_tokens) == (len(FOX), 6)
            assert [each.complete.index for each in whole] == [0, 1]
            assert all(each.complete.matched_stop_str == "fox" for each in whole)

            assert (await engine.HealthCheck(pb.HealthCheckRequest())).healthy
            model = await engine.GetModelInfo(pb.GetModelInfoRequest())
            assert (model.served_model_name, model.max_context_length) == (MODEL.name, MODEL.max_model_len)
            assert (await engine.GetServerInfo(pb.GetServerInfoRequest())).server_type == "quire-grpc"
            assert (await engine.GetLoads(pb.GetLoadsRequest())).dp_rank_count == 1
            for wrong, code in (
                (request(sampling={"structural_tag": "x"}), grpc.StatusCode.UNIMPLEMENTED),
                (request(media_refs=pb.MediaRefs()), grpc.StatusCode.UNIMPLEMENTED),
                (request(sampling={"logprobs": -1}), grpc.StatusCode.INVALID_ARGUMENT),
                (request(sampling={"temperature": -1}), grpc.StatusCode.INVALID_ARGUMENT),
            ):
                with pytest.raises(aio.AioRpcError) as error:
                    async for _ in engine.Generate(wrong):
                        pass
                assert error.value.code() == code

    asyncio.run(main())


def test_a_router_gets_the_tokenizer(tmp_path: Path) -> None:
    """A router gets the tokenizer's files as a zip archive in chunks, with a checksum on the last one.

    On this machine, the files are where the model's description says.
    """

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            engine = pb_grpc.VllmEngineStub(stack.channel)
            model = await engine.GetModelInfo(pb.GetModelInfoRequest())
            method = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name["GetTokenizer"]
            request = message_factory.GetMessageClass(method.input_type)()
            chunks = [chunk async for chunk in engine.GetTokenizer(request)]

        data = b"".join(chunk.data for chunk in chunks)
        assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
        assert all(len(chunk.data) < 4 << 20 for chunk in chunks)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            given = archive.read("tokenizer.json")
            assert not [name for name in archive.namelist() if "safetensors" in name]
        assert given == (Path(model.tokenizer_path) / "tokenizer.json").read_bytes()

    asyncio.run(main())


def test_abort_ends_a_request(tmp_path: Path) -> None:
    """The call ends as CANCELLED and the core gets the cancellation; an unknown id is ignored."""

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda address: TestCore(address, limit=20)) as stack:
            engine = pb_grpc.VllmEngineStub(stack.channel)
            call = engine.Generate(request(request_id="long", stream=True, sampling={"max_tokens": 4000}))
            await call.read()
            await engine.Abort(pb.AbortRequest(request_ids=["long", "unknown"]))
            with pytest.raises(aio.AioRpcError, match="aborted") as error:
                await _drain(call)
            assert error.value.code() == grpc.StatusCode.CANCELLED
            await stack.core.saw(lambda core: len(core.cancelled) == 1)

    asyncio.run(main())


def test_a_principal_cannot_abort_requests_of_another(tmp_path: Path) -> None:
    """A request id belongs to a principal; with the id of another, abort does nothing."""
    path = tmp_path / "principals.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in "ab"}
    path.write_text("".join(f'[principals.{name}]\ntokens = ["{digest}"]\n' for name, digest in digests.items()))
    a, b = ([("authorization", f"Bearer {name}")] for name in "ab")

    async def main() -> None:
        async with running_stack(
            tmp_path, core=lambda address: TestCore(address, limit=20), principals=str(path)
        ) as stack:
            engine = pb_grpc.VllmEngineStub(stack.channel)
            call = engine.Generate(request(request_id="mine", stream=True, sampling={"max_tokens": 60}), metadata=a)
            await call.read()
            await engine.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=b)
            info = await engine.GetServerInfo(pb.GetServerInfoRequest(), metadata=b)

            assert (info.active_requests, stack.core.cancelled) == (1, [])
            await engine.Abort(pb.AbortRequest(request_ids=["mine"]), metadata=a)
            with pytest.raises(aio.AioRpcError, match="aborted"):
                await _drain(call)

    asyncio.run(main())


async def _drain(call: Any) -> None:
    while await call.read() is not aio.EOF:
        pass
