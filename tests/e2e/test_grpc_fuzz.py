"""Mutated calls of every method of `quire.v1`, the operator API and vLLM's engine protocol against a real service.

`services/test_api_fuzz.py` sends more such calls, only for `quire.v1`, to a front end without scheduler and worker.
"""

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as vllm

from measure.testbed.service import Served, serve
from quire.admin.v1 import admin_pb2 as admin
from quire.v1 import generation_pb2 as v1
from quire.v1 import model_pb2
from tests.e2e.reciting_model import make_reciting_model
from tests.examples import examples
from tests.services.test_api_fuzz import EXPECTED, mutate, seeds
from tests.services.test_fuzz import fill

PATIENCE_S = 120.0
MESSAGES = 4
"""Responses that are read before the client leaves."""
RELEASE_EXAMPLES = 3000
METHODS: list[MethodDescriptor] = [
    method
    for file, service in (
        (v1.DESCRIPTOR, "GenerationService"),
        (model_pb2.DESCRIPTOR, "ModelService"),
        (admin.DESCRIPTOR, "AdminService"),
        (vllm.DESCRIPTOR, "VllmEngine"),
    )
    for method in file.services_by_name[service].methods
]
TOKENS = vllm.TokenizedInput(input_ids=[5, 6, 7])
FOR_ENGINE = [
    ("Generate", vllm.GenerateRequest(request_id="e", tokenized=TOKENS, sampling_params=sampling, stream=stream))
    for stream, sampling in (
        (True, vllm.SamplingParams(
            temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, frequency_penalty=0.1, presence_penalty=0.1,
            repetition_penalty=1.1, max_tokens=6, min_tokens=1, stop=["END"], stop_token_ids=[7], n=2, logprobs=2,
            prompt_logprobs=1, seed=-1, logit_bias={3: 1.5}, truncate_prompt_tokens=2, ignore_eos=True,
        )),
        (False, vllm.SamplingParams(max_tokens=5, regex="[a-z]{2,4}")),
        (False, vllm.SamplingParams(max_tokens=5, choice=vllm.ChoiceConstraint(choices=["a", "b"]))),
        (True, vllm.SamplingParams(max_tokens=5, json_object=True)),
    )
]  # fmt: skip
FOR_ENGINE += [
    ("Generate", vllm.GenerateRequest(text="the fox", sampling_params=vllm.SamplingParams(max_tokens=900))),
    ("Embed", vllm.EmbedRequest(request_id="e", tokenized=TOKENS)),
    ("Abort", vllm.AbortRequest(request_ids=["e", "again"])),
    ("GetLoads", vllm.GetLoadsRequest(dp_rank=0, include=["core"])),
]
SEEDS: list[tuple[str, bytes]] = [
    *((f"/vllm.grpc.engine.VllmEngine/{name}", request.SerializeToString()) for name, request in FOR_ENGINE),
    *((method, request.SerializeToString()) for _, method, request in seeds()),
    *(
        (f"/quire.admin.v1.AdminService/{name}", request.SerializeToString())
        for name, request in (
            ("ListRequests", admin.ListRequestsRequest(limit=5)),
            ("DrainWorker", admin.DrainWorkerRequest(worker_id="none", move_requests=True)),
            ("ResumeWorker", admin.ResumeWorkerRequest(worker_id="none")),
            ("CancelRequest", admin.CancelRequestRequest(request_id="again")),
            ("GetStory", admin.GetStoryRequest(request_id="again")),
            ("Explain", admin.ExplainRequest(request_id="again")),
            ("Explain", admin.ExplainRequest(slowest=3)),
            ("Explain", admin.ExplainRequest(step="worker/7")),
            ("CompareStrategies", admin.CompareStrategiesRequest(rows=4)),
            ("WatchSteps", admin.WatchStepsRequest(tables=True)),
            ("SetLogLevel", admin.SetLogLevelRequest(level=admin.LOG_LEVEL_INFO)),
        )
    ),
]
CODES = EXPECTED | {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.OUT_OF_RANGE}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes]:
    """Return a method and the bytes of a request: one with any fields, or a sensible one with changed bytes."""
    if draw(st.booleans()):
        method = draw(st.sampled_from(METHODS))
        message = GetMessageClass(method.input_type)()
        if message.DESCRIPTOR.fields:
            fill(message, draw(st.data()))
        service = method.containing_service.full_name
        return f"/{service}/{method.name}", message.SerializeToString()
    name, payload = draw(st.sampled_from(SEEDS))
    return name, mutate(random.Random(draw(st.integers(0, 2**32))), payload)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, grpc.Channel]]:
    """Return a service with a small model, and a channel to it."""
    model = make_reciting_model(tmp_path_factory.mktemp("model"), ["one", "two", "three"], max_model_len=2048)
    flags = ("--parser=hermes", "--served-model-name=echo", "--default-max-tokens=20")
    with serve(model, *flags) as served, grpc.insecure_channel(served.grpc) as channel:
        yield served, channel


def check(channel: grpc.Channel, call: tuple[str, bytes]) -> None:
    """Make a call, and leave it after some responses; its status is defined and arrives in time."""
    name, payload = call
    method = next(each for each in METHODS if name == f"/{each.containing_service.full_name}/{each.name}")
    # The type stubs of grpc only have methods with a serializer.
    stub: Any = channel
    if method.client_streaming:
        responses = stub.stream_stream(name)(iter([payload]), timeout=PATIENCE_S)
    elif method.server_streaming:
        responses = stub.unary_stream(name)(payload, timeout=PATIENCE_S)
    else:
        responses = stub.unary_unary(name).future(payload, timeout=PATIENCE_S)
    try:
        if method.server_streaming:
            deque(islice(responses, MESSAGES), maxlen=0)
            responses.cancel()
        code = responses.code()
    except grpc.RpcError:
        code = responses.code()
    if code not in CODES:
        pytest.fail(f"{code}: {responses.details()} for {name} with {payload!r}")


@settings(max_examples=examples(20), suppress_health_check=list(HealthCheck), deadline=None)
@given(call=calls())
def test_no_call_does_harm(service: tuple[Served, grpc.Channel], call: tuple[str, bytes]) -> None:
    """Each call ends in time with a defined status, never INTERNAL or UNKNOWN."""
    check(service[1], call)


@pytest.mark.release
@pytest.mark.timeout(3600)
@settings(max_examples=RELEASE_EXAMPLES, suppress_health_check=list(HealthCheck), deadline=None)
@given(call=calls())
def test_no_call_of_many_does_harm(service: tuple[Served, grpc.Channel], call: tuple[str, bytes]) -> None:
    """The same with many more calls."""
    check(service[1], call)


def test_calls_leave_nothing_behind(service: tuple[Served, grpc.Channel]) -> None:
    """After all calls the service is empty, has logged no failure, and answers."""
    served, channel = service
    served.wait_until_empty()
    request = v1.GenerateOnceRequest(request=v1.GenerateRequest(chat=v1.ChatInput(messages=[v1.ChatMessage(role="u")])))
    once = channel.unary_unary(
        "/quire.v1.GenerationService/GenerateOnce",
        v1.GenerateOnceRequest.SerializeToString,
        v1.GenerateOnceResponse.FromString,
    )
    assert once(request, timeout=PATIENCE_S).choices[0].text == "onetwothree"
    assert [line for line in served.log_lines() if line["level"] in ("error", "critical")] == []
    assert "Traceback" not in served.log.read_text()
