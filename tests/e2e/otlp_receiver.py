"""A real OTLP/gRPC trace receiver in this process, with a way to wait for spans."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span and the process that made it."""

    service: str
    pid: int
    resource: dict[str, str]
    """Attributes of that process that are text."""
    span: trace_pb2.Span

    @property
    def name(self) -> str:
        """The span's name."""
        return self.span.name

    @property
    def attributes(self) -> dict[str, str]:
        """Its attributes that are text."""
        return {entry.key: entry.value.string_value for entry in self.span.attributes}

    @property
    def linked(self) -> set[bytes]:
        """Ids of the spans to which this one links."""
        return {link.span_id for link in self.span.links}


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects every span that is exported to `endpoint`."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes spans in."""
        with self._changed:
            for resource in request.resource_spans:
                attributes = {entry.key: entry.value for entry in resource.resource.attributes}
                service = attributes["service.name"].string_value
                pid = attributes["process.pid"].int_value
                texts = {key: value.string_value for key, value in attributes.items()}
                for scope in resource.scope_spans:
                    self._spans.extend(ReceivedSpan(service, pid, texts, span) for span in scope.spans)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, condition: Callable[[list[ReceivedSpan]], bool], timeout: float = 60.0) -> list[ReceivedSpan]:
        """All spans, as soon as they satisfy `condition`."""
        with self._changed:
            satisfied = self._changed.wait_for(lambda: condition(self._spans), timeout)
            names = sorted({f"{span.service}:{span.name}" for span in self._spans})
            assert satisfied, f"the awaited spans did not come; there are {names}"
            return list(self._spans)


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """A receiver on a free loopback port."""
    receiver = OtlpReceiver()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    receiver.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        server.stop(1).wait()
