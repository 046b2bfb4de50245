"""gRPC in Python by reflection: no stubs are generated, and no proto file is read."""

import sys
from pathlib import Path

import grpc
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

sys.path.append(str(Path(__file__).parents[1]))
from probe import DEMO, GRPC, KEY, LONG, QUESTION, Probe, frees, raises, run

PROBE = Probe("gRPC by reflection (Python)", "grpcio", "grpcio-reflection")
CHANNEL = grpc.insecure_channel(GRPC)
POOL = descriptor_pool.DescriptorPool(ProtoReflectionDescriptorDatabase(CHANNEL))
TURN = {"role": "user", "content": QUESTION}
ASKED = {"chat": {"messages": [TURN]}, "sampling": {"temperature": 0}}
ENDLESS = {"text": "And then", "stop": {"max_tokens": 2000, "ignore_eos": True}}


def method(service, name, channel=CHANNEL):
    """Return a callable of a method, made from the descriptors that the server sends."""
    found = POOL.FindServiceByName(f"quire.v1.{service}").methods_by_name[name]
    answer = message_factory.GetMessageClass(found.output_type)
    request = message_factory.GetMessageClass(found.input_type)
    make = channel.unary_stream if found.server_streaming else channel.unary_unary
    call = make(f"/quire.v1.{service}/{name}", request.SerializeToString, answer.FromString)

    def invoke(key=KEY, timeout=60, **fields):
        if name == "GenerateOnce":
            fields = {"request": fields}
        return call(request(**fields), metadata=[("authorization", f"Bearer {key}")], timeout=timeout)

    return invoke


def text_of(stream):
    """Return the text of a stream."""
    return "".join(each.delta.text for each in stream if each.WhichOneof("event") == "delta")


@PROBE.tries("list models")
def _():
    assert [model.name for model in method("ModelService", "ListModels")().models] == ["demo"]


@PROBE.tries("create")
def _():
    assert "7" in method("GenerationService", "GenerateOnce")(**ASKED).choices[0].text


@PROBE.tries("stream")
def _():
    assert "7" in text_of(method("GenerationService", "Generate")(**ASKED))


@PROBE.tries("usage in stream")
def _():
    *_, last = method("GenerationService", "Generate")(**ASKED)
    assert last.finished.usage.completion_tokens > 0


@PROBE.tries("async")
async def _():
    found = POOL.FindServiceByName("quire.v1.GenerationService").methods_by_name["Generate"]
    answer, request = (message_factory.GetMessageClass(each) for each in (found.output_type, found.input_type))
    async with grpc.aio.insecure_channel(GRPC) as channel:
        call = channel.unary_stream(
            "/quire.v1.GenerationService/Generate", request.SerializeToString, answer.FromString
        )
        stream = call(request(**ASKED), metadata=[("authorization", f"Bearer {KEY}")], timeout=60)
        assert "7" in text_of([each async for each in stream])


@PROBE.tries("n")
def _():
    answer = method("GenerationService", "GenerateOnce")(text="The sun", sampling={"n": 3}, stop={"max_tokens": 4})
    assert len(answer.choices) == 3


@PROBE.tries("stop")
def _():
    answer = method("GenerationService", "GenerateOnce")(**ASKED, stop={"stop_strings": ["7"]})
    assert "7" not in answer.choices[0].text


@PROBE.tries("seed")
def _():
    generate = method("GenerationService", "GenerateOnce")
    texts = {
        generate(text="The old king", sampling={"seed": 5, "temperature": 1}, stop={"max_tokens": 8}).choices[0].text
        for _ in range(2)
    }
    assert len(texts) == 1


@PROBE.tries("logprobs")
def _():
    stream = method("GenerationService", "Generate")(**ASKED, output={"logprobs": 2})
    found = [each for message in stream for each in message.delta.logprobs]
    assert found
    assert all(len(each.top) == 2 for each in found)


@PROBE.tries("structured output")
def _():
    answer = method("GenerationService", "GenerateOnce")(**ASKED, grammar={"regex": "[0-9]{3}"})
    assert answer.choices[0].text.isdecimal()


@PROBE.tries("embeddings")
def _():
    answer = method("GenerationService", "Embed")(inputs=[{"text": "a bird"}, {"text": "a king"}])
    assert len(answer.embeddings) == 2


@PROBE.tries("count tokens")
def _():
    assert len(method("GenerationService", "Tokenize")(chat={"messages": [TURN]}).token_ids) > 3


@PROBE.tries("error: unknown model")
def _():
    with raises(grpc.RpcError, "NOT_FOUND"):
        method("GenerationService", "GenerateOnce")(**ASKED, model="gpt-4o")


@PROBE.tries("error: context overflow")
def _():
    with raises(grpc.RpcError, "maximum context length"):
        method("GenerationService", "GenerateOnce")(text=LONG)


@PROBE.tries("error: bad key")
def _():
    with raises(grpc.RpcError, "UNAUTHENTICATED"):
        method("GenerationService", "GenerateOnce")(key="wrong", **ASKED)


@PROBE.tries("error: in a stream")
def _():
    with raises(grpc.RpcError, "DEADLINE_EXCEEDED"):
        list(method("GenerationService", "Generate")(timeout=0.5, **ENDLESS))


@PROBE.tries("cancel")
def _():
    with frees(DEMO):
        stream = method("GenerationService", "Generate")(**ENDLESS)
        next(stream)
        stream.cancel()


@PROBE.tries("timeout")
def _():
    with raises(grpc.RpcError, "DEADLINE_EXCEEDED"):
        method("GenerationService", "GenerateOnce")(timeout=0.2, **ENDLESS)


for name in ("tools: required", "tools: named"):
    PROBE.absent(name, "quire.v1 takes tools for the chat template; a call is forced with a grammar")
PROBE.absent("previous_response_id", "quire.v1 has Resume instead")

run(PROBE)
