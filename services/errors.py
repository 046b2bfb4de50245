"""Errors in the form gRPC gives them: google.rpc.Status with ErrorInfo, BadRequest and RetryInfo; and what the core's
reasons for ending a stream mean to a client. The only place that knows either mapping.
"""

import grpc
from google.protobuf import any_pb2, message
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2
from shared.errors import (
    DeadlineError,
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    NotReadyError,
    NoWorkerError,
    PoisonRequestError,
    QueueFullError,
    QuireError,
    RowFailedError,
    StalledReaderError,
    UnsupportedFieldError,
)

ERROR_DOMAIN = "quire"
"""The domain in every ErrorInfo."""
PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata that gRPC clients with a retry policy obey."""
RETRY_MS = 1000
"""When to try again while the service is starting, the core is away, or the process has enough in hand."""

_FINISH_REASONS: dict[link_pb2.EndReason.ValueType, generation_pb2.FinishReason.ValueType] = {
    link_pb2.END_REASON_STOP: generation_pb2.FINISH_REASON_STOP,
    link_pb2.END_REASON_STOP_STRING: generation_pb2.FINISH_REASON_STOP,
    link_pb2.END_REASON_LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


class RequestCancelledError(QuireError):
    """The request was cancelled by somebody other than the client, who would not be here to read this."""

    code = "CANCELLED"
    reason = "CANCELLED"


class InternalError(QuireError):
    """A fault of ours; `error_id` finds it in the logs."""

    def __init__(self, error_id: str) -> None:
        super().__init__(f"internal error {error_id}; the server's log tells more")
        self.error_id = error_id


def finish_reason(end: link_pb2.StreamEnd) -> generation_pb2.FinishReason.ValueType | None:
    """The reason for `Finished`, or None when the stream ended with an error."""
    return _FINISH_REASONS.get(end.reason)


def error_of(end: link_pb2.StreamEnd) -> QuireError:
    """The error that an unsuccessful end is for the client."""
    message = end.message
    match end.reason:
        case link_pb2.END_REASON_CANCELLED:
            return RequestCancelledError(message or "the request was cancelled")
        case link_pb2.END_REASON_DEADLINE:
            return DeadlineError(message or "the deadline passed before the answer was complete")
        case link_pb2.END_REASON_QUEUE_FULL:
            return QueueFullError(message or "the waiting queue is full", retry_ms=end.retry_ms or RETRY_MS)
        case link_pb2.END_REASON_INVALID:
            return InvalidRequestError(FieldViolation("input", message or "the request cannot run"))
        case link_pb2.END_REASON_NO_WORKER:
            return NoWorkerError(message or "no worker is available", retry_ms=RETRY_MS)
        case link_pb2.END_REASON_ROW_FAILED:
            return RowFailedError(message or "the model could not compute this request")
        case link_pb2.END_REASON_POISON:
            return PoisonRequestError(message or "workers died of this request")
        case link_pb2.END_REASON_STALLED:
            return StalledReaderError(message or "the client took no data for too long")
        case link_pb2.END_REASON_DUPLICATE:
            return DuplicateRequestError(message or "a request with this id is live or kept")
        case link_pb2.END_REASON_SHUTDOWN:
            return NotReadyError(message or "the service is shutting down", retry_ms=RETRY_MS)
        case unknown:
            return RowFailedError(f"the scheduler ended the request with reason {unknown}")


def to_status(error: QuireError) -> grpc.Status:
    """The error as the status that ends an RPC."""
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=_metadata(error))
    details: list[message.Message] = [info]
    if isinstance(error, InvalidRequestError):
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field=v.field, description=v.description)
                    for v in error.violations
                ]
            )
        )
    if error.retry_ms is not None:
        delay = Duration()
        delay.FromMilliseconds(error.retry_ms)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(
        code=getattr(grpc.StatusCode, error.code).value[0],
        message=error.message,
        details=[_packed(detail) for detail in details],
    )
    plain = rpc_status.to_status(status)
    pushback = () if error.retry_ms is None else ((PUSHBACK_KEY, str(error.retry_ms)),)
    full: grpc.Status = plain._replace(trailing_metadata=(*plain.trailing_metadata, *pushback))
    return full


def to_error(error: QuireError) -> generation_pb2.Error:
    """The error of one request of a batch, whose call goes on."""
    message = generation_pb2.Error(code=error.code, reason=error.reason, message=error.message)
    if isinstance(error, InvalidRequestError):
        for violation in error.violations:
            message.violations.add(field=violation.field, description=violation.description)
    if error.retry_ms is not None:
        message.retry_after.FromMilliseconds(error.retry_ms)
    return message


def _metadata(error: QuireError) -> dict[str, str]:
    if isinstance(error, UnsupportedFieldError):
        return {"field": error.field}
    if isinstance(error, InternalError):
        return {"error_id": error.error_id}
    return {}


def _packed(detail: message.Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
