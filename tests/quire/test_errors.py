"""Which client class each error of the server becomes."""

from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

import grpc
import pytest

import services.errors
import services.http.errors  # noqa: F401  # defines errors of its own
import shared.errors
from quire import Client, errors
from tests.quire.scripted_server import fail, reason, scripted_server

ErrorT = TypeVar("ErrorT", bound=Exception)


def subclasses(base: type[ErrorT]) -> Iterator[type[ErrorT]]:
    """The class and everything that inherits from it."""
    yield base
    for each in base.__subclasses__():
        yield from subclasses(each)


SERVER_ERRORS = {error.reason: error for error in subclasses(shared.errors.QuireError)}
CLIENT_ERRORS = [error for error in subclasses(errors.QuireError) if error is not errors.QuireError]


def test_every_reason_belongs_to_exactly_one_class() -> None:
    """Client and server know the same reasons, no two classes share one, and no class is without any."""
    claims = Counter(name for error in CLIENT_ERRORS for name in error.reasons)

    assert set(claims) == set(SERVER_ERRORS)
    assert [name for name, count in claims.items() if count > 1] == []
    assert [error.__name__ for error in CLIENT_ERRORS if not error.reasons] == []


def test_every_status_code_belongs_to_at_most_one_class() -> None:
    """Without a known reason the class follows from the code alone, so no two classes claim one."""
    claims = Counter(name for error in CLIENT_ERRORS for name in error.codes)

    assert set(claims) <= {code.name for code in grpc.StatusCode}
    assert [name for name, count in claims.items() if count > 1] == []


@pytest.mark.parametrize(
    ("name", "expected"), [(name, error) for error in CLIENT_ERRORS for name in sorted(error.reasons)]
)
def test_every_reason_raises_its_class(name: str, expected: type[errors.QuireError]) -> None:
    """A call that a server ends with a reason, under that reason's status code, raises the class that lists it."""
    code = grpc.StatusCode[SERVER_ERRORS[name].code]
    with scripted_server() as server, Client(server.target) as client:
        server.script = lambda _request, context: fail(context, code, "refused", reason(name))

        with pytest.raises(errors.QuireError) as caught:
            client.generate("text").result()

        assert type(caught.value) is expected
        assert caught.value.reason == name
