"""Errors in OpenAI's form: a JSON object with message, type, param and code, under the right HTTP status.

Statuses follow from the gRPC codes that the errors carry. 429 and 503 say in Retry-After when to try again. `code` is
the stable reason that gRPC clients find in ErrorInfo, in lower case.
"""

import math
from collections.abc import Callable
from typing import TypedDict

from shared.errors import (
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    QuireError,
    UnsupportedFieldError,
)

_STATUS = {
    "INVALID_ARGUMENT": 400,
    "OUT_OF_RANGE": 400,
    "FAILED_PRECONDITION": 400,
    "UNIMPLEMENTED": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ABORTED": 408,
    "ALREADY_EXISTS": 409,
    # Neither the client, who would not be here to read it, nor a fault: OpenAI's clients must not try it again.
    "CANCELLED": 410,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class ErrorBody(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """What an unsuccessful request is answered with."""

    error: ErrorBody


class TooLargeError(QuireError):
    """The body is larger than the server reads."""

    code = "OUT_OF_RANGE"
    reason = "REQUEST_TOO_LARGE"


class SlowBodyError(QuireError):
    """The body did not arrive in time."""

    code = "ABORTED"
    reason = "SLOW_BODY"


def status_of(error: QuireError) -> int:
    """The HTTP status of an error."""
    return 413 if isinstance(error, TooLargeError) else _STATUS.get(error.code, 500)


def answer_of(error: QuireError) -> ErrorAnswer:
    """The body of an error."""
    return make_answer(status_of(error), error.message, param=_param(error), code=error.reason.lower())


def make_answer(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """An error's body under a status."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def headers_of(error: QuireError) -> dict[str, str]:
    """The headers that an error adds."""
    return {} if error.retry_ms is None else {"retry-after": str(max(1, math.ceil(error.retry_ms / 1000)))}


def renamed(error: QuireError, name: Callable[[str], str]) -> QuireError:
    """The error with its fields called as in HTTP; `name` maps a field's path in the proto."""
    if isinstance(error, InvalidRequestError):
        return InvalidRequestError(*(FieldViolation(name(v.field), v.description) for v in error.violations))
    if isinstance(error, UnsupportedFieldError):
        return UnsupportedFieldError(name(error.field))
    return error


def _param(error: QuireError) -> str | None:
    if isinstance(error, InvalidRequestError) and error.violations:
        return error.violations[0].field
    if isinstance(error, UnsupportedFieldError):
        return error.field
    return "model" if isinstance(error, ModelNotFoundError) else None
