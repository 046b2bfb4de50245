"""Every error a client may see, each one class with a gRPC status code, a stable reason and maybe a retry hint.

They are raised in the part that finds the fault and turned into wire form in one place per protocol (gRPC:
`services/errors.py`). `message` is one line that names the remedy and never holds prompt content.
"""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request, named as the public proto names it."""

    field: str
    description: str


class QuireError(Exception):
    """Base of all errors that reach clients."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code."""
    reason: ClassVar[str] = "INTERNAL"
    """Stable, machine-readable; goes into google.rpc.ErrorInfo."""

    def __init__(self, message: str, *, retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_ms = retry_ms


class InvalidRequestError(QuireError):
    """The request can never succeed as it is; `violations` name the fields."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_REQUEST"

    def __init__(self, *violations: FieldViolation) -> None:
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = violations


class UnsupportedFieldError(QuireError):
    """A field that this version knows but does not support yet."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED_FIELD"

    def __init__(self, field: str) -> None:
        super().__init__(f"{field}: not supported by this version; leave it unset")
        self.field = field


class UnsupportedMethodError(QuireError):
    """A method that this version knows but does not support yet."""

    code = "UNIMPLEMENTED"
    reason = "UNSUPPORTED_METHOD"


class UnauthenticatedError(QuireError):
    """Nobody known is calling."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(QuireError):
    """The caller is known and may not do this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class ModelNotFoundError(QuireError):
    """No model of that name is served."""

    code = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class WorkerNotFoundError(QuireError):
    """No usable worker of that name is there."""

    code = "NOT_FOUND"
    reason = "WORKER_NOT_FOUND"


class DuplicateRequestError(QuireError):
    """A live request has the same id."""

    code = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST_ID"


class RequestNotFoundError(QuireError):
    """No live or kept request has the id."""

    code = "NOT_FOUND"
    reason = "REQUEST_NOT_FOUND"


class QueueFullError(QuireError):
    """The waiting queue is full; try again after `retry_ms`."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"


class OverloadedError(QuireError):
    """This front end has as much in hand as it may; try again after `retry_ms`."""

    code = "RESOURCE_EXHAUSTED"
    reason = "OVERLOADED"


class NoWorkerError(QuireError):
    """No worker was there for longer than the configured wait."""

    code = "UNAVAILABLE"
    reason = "NO_WORKER"


class NotReadyError(QuireError):
    """The service is starting or shutting down."""

    code = "UNAVAILABLE"
    reason = "NOT_READY"


class DeadlineError(QuireError):
    """The client's deadline passed before the answer was complete."""

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE"


class StalledReaderError(QuireError):
    """The client took no data for longer than the configured time."""

    code = "ABORTED"
    reason = "STALLED_READER"


class PoisonRequestError(QuireError):
    """Workers died of this request, the last one of nothing else; it must not be sent again."""

    code = "INTERNAL"
    reason = "POISON_REQUEST"


class RowFailedError(QuireError):
    """The model could not compute this request; others were not affected."""

    code = "INTERNAL"
    reason = "ROW_FAILED"
