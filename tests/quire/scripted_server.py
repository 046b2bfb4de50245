"""A gRPC server with scripted responses, which tests the client."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import NoReturn

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from quire.v1 import generation_pb2 as pb
from quire.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc

Script = Callable[[pb.GenerateRequest, grpc.ServicerContext], Iterable[pb.GenerateResponse]]


class ScriptedServer(generation_pb2_grpc.GenerationServiceServicer, model_pb2_grpc.ModelServiceServicer):
    """Plays `script` for every Generate and keeps the requests."""

    def __init__(self) -> None:
        self.target = ""
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.deadlines: list[float | None] = []
        self.cancelled = threading.Event()
        """Set when a client ends a call early."""
        self.asked = threading.Semaphore(0)
        """Released once per Generate."""
        self.resumed: list[pb.ResumeRequest] = []
        """The requests of Resume."""
        self.dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
        """The ids of Cancel."""
        self.script: Script = lambda _request, _context: [delta(0, [1], "hi"), finished()]

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        """Answer with the messages of the script."""
        self._note(context)
        self.requests.append(request)
        self.asked.release()
        complete = threading.Event()
        context.add_callback(lambda: None if complete.is_set() else self.cancelled.set())
        yield from self.script(request, context)
        complete.set()

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.ResumeResponse]:
        """Answer with the messages of the script."""
        self.resumed.append(request)
        for response in self.script(pb.GenerateRequest(request_id=request.request_id), context):
            yield pb.ResumeResponse(response=response)

    def Cancel(self, request: pb.CancelRequest, context: grpc.ServicerContext) -> pb.CancelResponse:
        """Record the cancelled request."""
        self.dropped.put(request.request_id)
        return pb.CancelResponse()

    def GenerateBatch(
        self, requests: Iterator[pb.GenerateBatchRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateBatchResponse]:
        """Answer each request with the messages of the script."""
        for request in requests:
            for response in self.script(request.request, context):
                yield pb.GenerateBatchResponse(key=request.key, response=response)

    def Tokenize(self, request: pb.TokenizeRequest, context: grpc.ServicerContext) -> pb.TokenizeResponse:
        """Answer with one token per character, or per message of a chat."""
        self._note(context)
        ids = [ord(letter) for letter in request.text] or [len(m.content) for m in request.chat.messages]
        return pb.TokenizeResponse(token_ids=ids[1 if request.omit_special_tokens else 0 :], max_model_len=512)

    def Detokenize(self, request: pb.DetokenizeRequest, context: grpc.ServicerContext) -> pb.DetokenizeResponse:
        """Answer with one character per token."""
        self._note(context)
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.ServicerContext) -> model_pb2.GetModelResponse:
        """Answer with the model `demo`, or NOT_FOUND for another name."""
        self._note(context)
        if request.name not in ("", "demo"):
            fail(context, grpc.StatusCode.NOT_FOUND, "no such model", reason("MODEL_NOT_FOUND"))
        model = model_pb2.Model(name="demo", max_model_len=512, vocab_size=300, eos_token_ids=[2], dtype="float32")
        return model_pb2.GetModelResponse(model=model)

    def _note(self, context: grpc.ServicerContext) -> None:
        self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
        remaining = context.time_remaining()
        self.deadlines.append(remaining if remaining and remaining < 1e6 else None)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    """A running server on a free port."""
    servicer = ScriptedServer()  # type: ignore[abstract]  # the rest is not called
    server = grpc.server(futures.ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        server.stop(None).wait()


def delta(first_index: int, token_ids: Iterable[int], text: str) -> pb.GenerateResponse:
    """A message with more output."""
    return pb.GenerateResponse(delta=pb.Delta(first_index=first_index, token_ids=token_ids, text=text))


def finished(reason: pb.FinishReason.ValueType = pb.FINISH_REASON_LENGTH, **fields: object) -> pb.GenerateResponse:
    """The final message."""
    end = pb.Finished(reason=reason, request_id="r1", model="demo", **fields)  # type: ignore[arg-type]
    return pb.GenerateResponse(finished=end)


def reason(name: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    """An error detail as Quire's servers send it."""
    return error_details_pb2.ErrorInfo(domain="quire", reason=name, metadata=metadata)


def fail(context: grpc.ServicerContext, code: grpc.StatusCode, message: str, *details: Message) -> NoReturn:
    """Ends a call as Quire's servers do."""
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")
