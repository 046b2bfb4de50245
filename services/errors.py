"""Maps errors to google.rpc.Status (with ErrorInfo, BadRequest, RetryInfo), and the core's end reasons to errors.

Both mappings exist only here. `grpc.boundary` applies the first mapping to every call; `http.errors` maps errors to
HTTP.
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
    OverloadedError,
    PoisonRequestError,
    QueueFullError,
    QuireError,
    RequestNotFoundError,
    RowFailedError,
    StalledReaderError,
    TenantLimitError,
    UnsupportedFieldError,
    UnsupportedMethodError,
    WorkerNotFoundError,
)

ERROR_DOMAIN = "quire"
"""Domain of every ErrorInfo."""
PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Trailing metadata key that gRPC's client-side retry policy reads."""
RETRY_MS = 1000
"""Retry delay while the service starts, the core is not connected, or the process is overloaded; milliseconds."""

_FINISH_REASONS: dict[link_pb2.EndReason.ValueType, generation_pb2.FinishReason.ValueType] = {
    link_pb2.END_REASON_STOP: generation_pb2.FINISH_REASON_STOP,
    link_pb2.END_REASON_STOP_STRING: generation_pb2.FINISH_REASON_STOP,
    link_pb2.END_REASON_LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}


_OPERATOR_ERRORS: dict[str, type[QuireError]] = {
    each.reason: each
    for each in (NotReadyError, OverloadedError, RequestNotFoundError, UnsupportedMethodError, WorkerNotFoundError)
}


class RequestCancelledError(QuireError):
    """The server or an operator cancelled the request, not the client."""

    code = "CANCELLED"
    reason = "CANCELLED"


class InternalError(QuireError):
    """An internal error; `error_id` identifies its log line."""

    def __init__(self, error_id: str) -> None:
        super().__init__(f"internal error {error_id}; see the server's log for this id")
        self.error_id = error_id


def finish_reason(end: link_pb2.StreamEnd) -> generation_pb2.FinishReason.ValueType | None:
    """Return the finish reason of a stream, or None when it ended with an error."""
    return _FINISH_REASONS.get(end.reason)


def error_of(end: link_pb2.StreamEnd) -> QuireError:
    """Return the error for a stream that did not end successfully."""
    message = end.message
    match end.reason:
        case link_pb2.END_REASON_CANCELLED:
            return RequestCancelledError(message or "the request was cancelled")
        case link_pb2.END_REASON_DEADLINE:
            # The scheduler suggests a delay if it refuses a request on arrival because of a forecast.
            return DeadlineError(
                message or "the deadline passed before the answer was complete", retry_ms=end.retry_ms or None
            )
        case link_pb2.END_REASON_QUEUE_FULL:
            return QueueFullError(
                message or "the waiting queue is full; try again later", retry_ms=end.retry_ms or RETRY_MS
            )
        case link_pb2.END_REASON_TENANT_LIMIT:
            return TenantLimitError(
                message or "the tenant is at its own limit; try again later", retry_ms=end.retry_ms or RETRY_MS
            )
        case link_pb2.END_REASON_INVALID:
            return InvalidRequestError(FieldViolation(end.field or "input", message or "the request cannot run"))
        case link_pb2.END_REASON_NO_WORKER:
            return NoWorkerError(message or "no worker is available; try again later", retry_ms=RETRY_MS)
        case link_pb2.END_REASON_ROW_FAILED:
            return RowFailedError(message or "the model could not compute this request")
        case link_pb2.END_REASON_POISON:
            return PoisonRequestError(
                message or "workers crashed while they computed this request; do not send it again"
            )
        case link_pb2.END_REASON_STALLED:
            return StalledReaderError(
                message or "the client read no data for too long; read the stream without long pauses"
            )
        case link_pb2.END_REASON_DUPLICATE:
            return DuplicateRequestError(message or "request_id: in use by a live or resumable request; choose another")
        case link_pb2.END_REASON_SHUTDOWN:
            return NotReadyError(message or "the service is shutting down; try again later", retry_ms=RETRY_MS)
        case unknown:
            return RowFailedError(f"the scheduler ended the request for an unknown reason ({unknown})")


def operator_error(error: link_pb2.OperatorError) -> QuireError:
    """Convert the core's error reply to an operator request into an exception."""
    if error.field:
        return InvalidRequestError(FieldViolation(error.field, error.message))
    return _OPERATOR_ERRORS.get(error.reason, QuireError)(error.message)


def to_status(error: QuireError) -> grpc.Status:
    """Return the error as the status that ends an RPC."""
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
    """Return the error message for one request in a batch. The call continues."""
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
