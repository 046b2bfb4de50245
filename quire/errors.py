"""Errors of the Python client: one class per reason that the server sends, and a few local ones.

The server ends a failed call with a google.rpc.Status whose ErrorInfo carries a stable reason; `shared.errors` lists
the reasons. Each reason maps to a class here. An unknown reason maps to the class of its status code, so that an old
client can still distinguish invalid requests from transient failures of a new server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

DOMAIN = "quire"
"""ErrorInfo domain of the reasons listed here."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """An invalid field of a request, named as in the public proto."""

    field: str
    description: str


class QuireError(Exception):
    """Base class of all errors that calls to Quire raise."""

    reasons: ClassVar[frozenset[str]] = frozenset()
    """ErrorInfo reasons that map to this class."""
    codes: ClassVar[frozenset[str]] = frozenset()
    """gRPC status codes that map to this class if the reason is unknown."""

    def __init__(
        self,
        message: str,
        *,
        code: str = "INTERNAL",
        reason: str = "",
        retry_after_s: float | None = None,
        violations: Sequence[FieldViolation] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """Name of the gRPC status code."""
        self.reason = reason
        """Stable reason from the server; empty if the error did not come from a Quire server."""
        self.retry_after_s = retry_after_s
        """Seconds to wait before a retry; None if the server gave no hint."""
        self.violations = tuple(violations)
        """Invalid fields."""
        self.metadata = dict(metadata or {})
        """Metadata of the ErrorInfo."""

    @property
    def from_server(self) -> bool:
        """Whether a Quire server sent the error. Otherwise the connection or this client caused it."""
        return bool(self.reason)


class InvalidRequestError(QuireError):
    """The request is invalid and must not be retried unchanged; `violations` name the fields."""

    reasons = frozenset({"INVALID_REQUEST", "REQUEST_TOO_LARGE", "UNSUPPORTED_MEDIA_TYPE"})
    codes = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION"})


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit into the model's context: shorten the prompt or lower `max_tokens`."""

    reasons = frozenset({"CONTEXT_LENGTH_EXCEEDED"})
    codes = frozenset()


class UnsupportedFieldError(QuireError):
    """The server knows a field but does not support it."""

    reasons = frozenset({"UNSUPPORTED_FIELD", "UNSUPPORTED_METHOD"})
    codes = frozenset({"UNIMPLEMENTED"})


class UnauthenticatedError(QuireError):
    """The credentials are missing or unknown; use a token or a certificate."""

    reasons = frozenset({"UNAUTHENTICATED"})
    codes = frozenset({"UNAUTHENTICATED"})


class PermissionDeniedError(QuireError):
    """The caller is authenticated but lacks the permission."""

    reasons = frozenset({"PERMISSION_DENIED"})
    codes = frozenset({"PERMISSION_DENIED"})


class PoisonRequestError(QuireError):
    """Workers crashed while they computed this request; do not send it again."""

    reasons = frozenset({"POISON_REQUEST"})


class ModelNotFoundError(QuireError):
    """No model with this name is served."""

    reasons = frozenset({"MODEL_NOT_FOUND"})
    codes = frozenset({"NOT_FOUND"})


class WorkerNotFoundError(QuireError):
    """No usable worker has this name."""

    reasons = frozenset({"WORKER_NOT_FOUND"})


class RequestNotFoundError(QuireError):
    """The server does not know the request, or has already discarded it."""

    reasons = frozenset({"REQUEST_NOT_FOUND"})


class DuplicateRequestError(QuireError):
    """A running or stored request has the same id."""

    reasons = frozenset({"DUPLICATE_REQUEST_ID"})
    codes = frozenset({"ALREADY_EXISTS"})


class QueueFullError(QuireError):
    """The server is overloaded, or the tenant has reached its own limit; retry after `retry_after_s`."""

    reasons = frozenset({"QUEUE_FULL", "OVERLOADED", "TENANT_LIMIT"})
    codes = frozenset({"RESOURCE_EXHAUSTED"})


class UnavailableError(QuireError):
    """The server is unreachable, starting, shutting down, or has no worker."""

    reasons = frozenset({"NO_WORKER", "NOT_READY"})
    codes = frozenset({"UNAVAILABLE"})


class DeadlineError(QuireError):
    """The timeout of the call passed before the answer was complete."""

    reasons = frozenset({"DEADLINE"})
    codes = frozenset({"DEADLINE_EXCEEDED"})


class CancelledError(QuireError):
    """The call was cancelled, by `cancel()` or by the server."""

    reasons = frozenset({"CANCELLED"})
    codes = frozenset({"CANCELLED"})


class StalledReaderError(QuireError):
    """The server cancelled the request because this client read no data for too long."""

    reasons = frozenset({"STALLED_READER", "SLOW_BODY"})
    codes = frozenset({"ABORTED"})


class ServerError(QuireError):
    """The server failed, or its answer violates the API."""

    reasons = frozenset({"INTERNAL", "ROW_FAILED"})


_CLASSES = (
    InvalidRequestError,
    ContextLengthError,
    UnsupportedFieldError,
    UnauthenticatedError,
    PermissionDeniedError,
    PoisonRequestError,
    ModelNotFoundError,
    WorkerNotFoundError,
    RequestNotFoundError,
    DuplicateRequestError,
    QueueFullError,
    UnavailableError,
    DeadlineError,
    CancelledError,
    StalledReaderError,
    ServerError,
)
_BY_REASON = {reason: error for error in _CLASSES for reason in error.reasons}
_BY_CODE = {code: error for error in _CLASSES for code in error.codes}


def class_for(code: str, reason: str) -> type[QuireError]:
    """Return the error class for this status code and reason."""
    return _BY_REASON.get(reason) or _BY_CODE.get(code, ServerError)
