"""Errors in OpenAI's form: a JSON object with message, type, param and code, and an HTTP status.

The status follows from the error's gRPC code. 429 and 503 carry Retry-After, and so does a 504 because of a forecast.
`code` is the stable reason that gRPC clients find in ErrorInfo, in lower case.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from shared.errors import (
    FieldDeniedError,
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
    # The server or an operator has cancelled the request, so clients of OpenAI's API must not retry it.
    "CANCELLED": 410,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types in the Messages API, by status."""
_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class ErrorBody(TypedDict):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Body of an error response."""

    error: ErrorBody


class TooLargeError(QuireError):
    """The body exceeds the maximum size."""

    code = "OUT_OF_RANGE"
    reason = "REQUEST_TOO_LARGE"


class ContentTypeError(QuireError):
    """The Content-Type is not application/json, or the body is compressed."""

    code = "INVALID_ARGUMENT"
    reason = "UNSUPPORTED_MEDIA_TYPE"


class SlowBodyError(QuireError):
    """The body did not arrive in time."""

    code = "ABORTED"
    reason = "SLOW_BODY"


_OWN_STATUS: dict[type[QuireError], int] = {TooLargeError: 413, ContentTypeError: 415}


def status_of(error: QuireError) -> int:
    """Return the HTTP status of an error."""
    return _OWN_STATUS.get(type(error)) or _STATUS.get(error.code, 500)


def answer_of(error: QuireError) -> ErrorAnswer:
    """Return the body of an error."""
    return make_answer(status_of(error), error.message, param=_param(error), code=error.reason.lower())


def make_answer(status: int, message: str, *, param: str | None = None, code: str | None = None) -> ErrorAnswer:
    """Return the body of an error with this status."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an API writes errors and ends streams."""

    error: Callable[[QuireError, str], Any]
    """Returns the error body for the request with this id."""
    error_event: Callable[[QuireError, str, int], Any]
    """Returns an error event within the stream of the request with this id, after this number of events."""
    id_headers: tuple[str, ...] = ("x-request-id",)
    """Response headers with the request's id."""
    names_events: bool = False
    """Whether each event is named by its type, and the stream ends without "[DONE]"."""


def _responses_event(error: QuireError, _request_id: str, num_events: int) -> dict[str, Any]:
    """Return an event with the fields in OpenAI's reference, and the error object that clients of all APIs expect."""
    body = answer_of(error)["error"]
    fields = {name: body[name] for name in ("code", "message", "param")}
    return {"type": "error", "sequence_number": num_events, **fields, "error": body}


def make_messages_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return an error body with this status in the format of the Messages API."""
    kind = _MESSAGES_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


COMPLETIONS = Dialect(
    error=lambda error, _id: answer_of(error),
    error_event=lambda error, _id, _count: answer_of(error),
)
"""Completions, chat and everything else of OpenAI's."""
RESPONSES = Dialect(
    error=lambda error, _id: answer_of(error),
    error_event=_responses_event,
    names_events=True,
)
MESSAGES = Dialect(
    error=lambda error, request_id: make_messages_error(status_of(error), error.message, request_id),
    error_event=lambda error, request_id, _count: make_messages_error(status_of(error), error.message, request_id),
    id_headers=("x-request-id", "request-id"),
    names_events=True,
)


def headers_of(error: QuireError) -> dict[str, str]:
    """Return the additional headers of an error."""
    return {} if error.retry_ms is None else {"retry-after": str(max(1, math.ceil(error.retry_ms / 1000)))}


def with_http_names(error: QuireError, name: Callable[[str], str]) -> QuireError:
    """Return the error with HTTP field names; `name` maps a field's path in the proto."""
    if isinstance(error, InvalidRequestError):
        return type(error)(*(FieldViolation(name(v.field), v.description) for v in error.violations))
    if isinstance(error, UnsupportedFieldError):
        return UnsupportedFieldError(name(error.field))
    if isinstance(error, FieldDeniedError):
        return FieldDeniedError(name(error.field), error.description)
    return error


def _param(error: QuireError) -> str | None:
    if isinstance(error, InvalidRequestError) and error.violations:
        return error.violations[0].field
    if isinstance(error, UnsupportedFieldError | FieldDeniedError):
        return error.field
    return "model" if isinstance(error, ModelNotFoundError) else None
