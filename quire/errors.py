"""What can go wrong for a client of Quire: one class per reason that the server gives, and a few that are
local.

The server ends a failed call with a google.rpc.Status whose ErrorInfo holds a stable reason; `shared.errors`
lists them on its side. Here a reason becomes a class. A reason that this version does not know becomes the
class of its status code, so that an old client against a new server still tells "my fault" from "try again".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

DOMAIN = "quire"
"""The ErrorInfo domain of reasons that mean what they say here."""


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One wrong field of a request, named as the public proto names it."""

    field: str
    description: str


class QuireError(Exception):
    """Base of everything that a call to Quire raises."""

    reasons: ClassVar[frozenset[str]] = frozenset()
    """The ErrorInfo reasons that become this class."""
    codes: ClassVar[frozenset[str]] = frozenset()
    """The gRPC status codes that become this class when the reason is not known."""

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
        """The server's stable reason, "" when the error did not come from a Quire server."""
        self.retry_after_s = retry_after_s
        """When the server asks to try again, None when it does not."""
        self.violations = tuple(violations)
        """The fields that are wrong."""
        self.metadata = dict(metadata or {})
        """What else the server says about the reason."""

    @property
    def from_server(self) -> bool:
        """Whether a Quire server said so; otherwise the connection or this client did."""
        return bool(self.reason)


class InvalidRequestError(QuireError):
    """The request can never succeed as it is; `violations` name the fields."""

    reasons = frozenset({"INVALID_REQUEST", "REQUEST_TOO_LARGE"})
    codes = frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "FAILED_PRECONDITION"})


class UnsupportedFieldError(QuireError):
    """The server knows a field but does not support it."""

    reasons = frozenset({"UNSUPPORTED_FIELD", "UNSUPPORTED_METHOD"})
    codes = frozenset({"UNIMPLEMENTED"})


class UnauthenticatedError(QuireError):
    """The server does not know who calls; give a token or a certificate."""

    reasons = frozenset({"UNAUTHENTICATED"})
    codes = frozenset({"UNAUTHENTICATED"})


class PermissionDeniedError(QuireError):
    """The caller is known and may not do this."""

    reasons = frozenset({"PERMISSION_DENIED"})
    codes = frozenset({"PERMISSION_DENIED"})


class PoisonRequestError(QuireError):
    """Workers died of this request; do not send it again."""

    reasons = frozenset({"POISON_REQUEST"})


class ModelNotFoundError(QuireError):
    """No model of that name is served."""

    reasons = frozenset({"MODEL_NOT_FOUND"})
    codes = frozenset({"NOT_FOUND"})


class WorkerNotFoundError(QuireError):
    """No usable worker of that name is there."""

    reasons = frozenset({"WORKER_NOT_FOUND"})


class RequestNotFoundError(QuireError):
    """Nothing is known, or kept any longer, of the request to go on with."""

    reasons = frozenset({"REQUEST_NOT_FOUND"})


class DuplicateRequestError(QuireError):
    """A live request has the same id."""

    reasons = frozenset({"DUPLICATE_REQUEST_ID"})
    codes = frozenset({"ALREADY_EXISTS"})


class QueueFullError(QuireError):
    """The server takes no more requests now; try again after `retry_after_s`."""

    reasons = frozenset({"QUEUE_FULL", "OVERLOADED"})
    codes = frozenset({"RESOURCE_EXHAUSTED"})


class UnavailableError(QuireError):
    """The server cannot be reached, is starting or stopping, or has no worker."""

    reasons = frozenset({"NO_WORKER", "NOT_READY"})
    codes = frozenset({"UNAVAILABLE"})


class DeadlineError(QuireError):
    """The call's timeout passed before the answer was complete."""

    reasons = frozenset({"DEADLINE"})
    codes = frozenset({"DEADLINE_EXCEEDED"})


class CancelledError(QuireError):
    """The call was cancelled, by `cancel()` here or by the server."""

    reasons = frozenset({"CANCELLED"})
    codes = frozenset({"CANCELLED"})


class StalledReaderError(QuireError):
    """The server gave up because this client took no data for too long."""

    reasons = frozenset({"STALLED_READER", "SLOW_BODY"})
    codes = frozenset({"ABORTED"})


class ServerError(QuireError):
    """The server failed, or answered what the API does not allow."""

    reasons = frozenset({"INTERNAL", "ROW_FAILED", "POISON_REQUEST"})


_CLASSES = (
    InvalidRequestError,
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
    """The class of an error with this status code and reason."""
    return _BY_REASON.get(reason) or _BY_CODE.get(code, ServerError)
