"""Errors that a client may see. Each class has a gRPC status code, a stable reason and possibly a retry hint.

The code that detects a problem raises the error, and one module per protocol converts it (gRPC: `services/errors.py`).
`message` is one line with the remedy and never contains prompt content.
"""

from dataclasses import dataclass
from typing import ClassVar, Self


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of a request, named as in the public proto."""

    field: str
    description: str


class QuireError(Exception):
    """Base class of all errors that reach clients."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    reason: ClassVar[str] = "INTERNAL"
    """Stable, machine-readable reason, which is sent in google.rpc.ErrorInfo."""

    def __init__(self, message: str, *, retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_ms = retry_ms

    def without_frames(self) -> Self:
        """Drop the traceback and the context, and return the error.

        If a local variable held the error, the error's traceback would refer to the frame of that variable. Such a
        cycle would retain everything in the traceback's frames, such as the request body, until the next garbage
        collection.
        """
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self


class InvalidRequestError(QuireError):
    """The request is invalid and must not be retried unchanged; `violations` name the fields."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit into the model's context. The client must shorten one of them."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class UnsupportedFieldError(QuireError):
    """The request sets a field that this version does not support yet."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED_FIELD"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: not supported by this version; leave it unset")
        self.field = field


class UnsupportedMethodError(QuireError):
    """The method is not supported by this version yet."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED_METHOD"


class UnauthenticatedError(QuireError):
    """The credentials of the caller are missing or unknown."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(QuireError):
    """The caller is authenticated but lacks the permission."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class FieldDeniedError(PermissionDeniedError):
    """The caller lacks the permission to use this value in a field."""

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class ModelNotFoundError(QuireError):
    """No model with this name is served."""

    code = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class WorkerNotFoundError(QuireError):
    """No usable worker has this name."""

    code = "NOT_FOUND"
    reason = "WORKER_NOT_FOUND"


class DuplicateRequestError(QuireError):
    """A running or stored request has the same id."""

    code = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST_ID"


class RequestNotFoundError(QuireError):
    """No running or stored request has this id."""

    code = "NOT_FOUND"
    reason = "REQUEST_NOT_FOUND"


class QueueFullError(QuireError):
    """The waiting queue is full; try again after `retry_ms`."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"


class TenantLimitError(QuireError):
    """The caller's tenant has reached its limit of waiting requests; retry after `retry_ms`."""

    code = "RESOURCE_EXHAUSTED"
    reason = "TENANT_LIMIT"


class OverloadedError(QuireError):
    """The front end has reached a limit; retry after `retry_ms`."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class NoWorkerError(QuireError):
    """No worker was available for longer than the configured wait."""

    code = "UNAVAILABLE"
    reason = "NO_WORKER"


class NotReadyError(QuireError):
    """The service is starting or shutting down."""

    code = "UNAVAILABLE"
    reason = "NOT_READY"


class DeadlineError(QuireError):
    """The client's deadline passed before the response was complete."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class StalledReaderError(QuireError):
    """The client read no data for longer than the configured time."""

    code = "ABORTED"
    reason = "STALLED_READER"


class PoisonRequestError(QuireError):
    """Workers crashed repeatedly while they computed this request, even when it ran alone. It must not be retried."""

    code = "INTERNAL"
    reason = "POISON_REQUEST"


class RowFailedError(QuireError):
    """The model or the worker could not compute this request. Other requests were not affected."""

    code = "INTERNAL"
    reason = "ROW_FAILED"
