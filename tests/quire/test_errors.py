"""The class of the Python client for each reason and each status code of the server."""

from collections.abc import Iterator
from typing import TypeVar

import grpc
import pytest

import services.errors
import services.http.errors  # The import defines further errors.
import services.http.responses.endpoint  # noqa: F401  # likewise
import shared.errors
from quire import Client, errors
from tests.quire.scripted_server import fail, reason, scripted_server

ErrorT = TypeVar("ErrorT", bound=Exception)


def subclasses(base: type[ErrorT]) -> Iterator[type[ErrorT]]:
    """Yield the class and all of its subclasses."""
    yield base
    for each in base.__subclasses__():
        yield from subclasses(each)


SERVER_ERRORS = {error.reason: error for error in subclasses(shared.errors.QuireError)}
CLASS_OF_REASON = {
    "CANCELLED": errors.CancelledError,
    "CONTEXT_LENGTH_EXCEEDED": errors.ContextLengthError,
    "DEADLINE": errors.DeadlineError,
    "DUPLICATE_REQUEST_ID": errors.DuplicateRequestError,
    "INTERNAL": errors.ServerError,
    "INVALID_REQUEST": errors.InvalidRequestError,
    "MODEL_NOT_FOUND": errors.ModelNotFoundError,
    "NOT_READY": errors.UnavailableError,
    "NO_WORKER": errors.UnavailableError,
    "OVERLOADED": errors.QueueFullError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "POISON_REQUEST": errors.PoisonRequestError,
    "PREVIOUS_RESPONSE_NOT_FOUND": errors.InvalidRequestError,
    "QUEUE_FULL": errors.QueueFullError,
    "REQUEST_NOT_FOUND": errors.RequestNotFoundError,
    "REQUEST_TOO_LARGE": errors.InvalidRequestError,
    "ROW_FAILED": errors.ServerError,
    "SLOW_BODY": errors.StalledReaderError,
    "STALLED_READER": errors.StalledReaderError,
    "TENANT_LIMIT": errors.QueueFullError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "UNSUPPORTED_FIELD": errors.UnsupportedFieldError,
    "UNSUPPORTED_MEDIA_TYPE": errors.InvalidRequestError,
    "UNSUPPORTED_METHOD": errors.UnsupportedFieldError,
    "WORKER_NOT_FOUND": errors.WorkerNotFoundError,
}
CLASS_OF_CODE = {
    "ABORTED": errors.StalledReaderError,
    "ALREADY_EXISTS": errors.DuplicateRequestError,
    "CANCELLED": errors.CancelledError,
    "DATA_LOSS": errors.ServerError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
    "FAILED_PRECONDITION": errors.InvalidRequestError,
    "INTERNAL": errors.ServerError,
    "INVALID_ARGUMENT": errors.InvalidRequestError,
    "NOT_FOUND": errors.ModelNotFoundError,
    "OUT_OF_RANGE": errors.InvalidRequestError,
    "PERMISSION_DENIED": errors.PermissionDeniedError,
    "RESOURCE_EXHAUSTED": errors.QueueFullError,
    "UNAUTHENTICATED": errors.UnauthenticatedError,
    "UNAVAILABLE": errors.UnavailableError,
    "UNIMPLEMENTED": errors.UnsupportedFieldError,
    "UNKNOWN": errors.ServerError,
}


def test_the_tables_are_complete() -> None:
    """Every server reason and every failure status code has a class in this file."""
    assert set(CLASS_OF_REASON) == set(SERVER_ERRORS)
    assert set(CLASS_OF_CODE) == {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.mark.parametrize(("name", "expected"), CLASS_OF_REASON.items())
def test_a_reason_raises_its_class(name: str, expected: type[errors.QuireError]) -> None:
    """A call that the server ends with a reason, with the reason's status code, raises the class of the reason."""
    code = grpc.StatusCode[SERVER_ERRORS[name].code]
    with scripted_server() as server, Client(server.target) as client:
        server.script = lambda _request, context: fail(context, code, "refused", reason(name))

        with pytest.raises(errors.QuireError) as caught:
            client.generate("text").result()

        assert type(caught.value) is expected
        assert caught.value.reason == name


@pytest.mark.parametrize(("code", "expected"), CLASS_OF_CODE.items())
def test_an_unknown_reason_raises_the_class_of_its_status_code(code: str, expected: type[errors.QuireError]) -> None:
    """An unknown reason from a newer server raises the class of its status code, so that retries still work."""
    assert errors.class_for(code, "BRAND_NEW") is expected
