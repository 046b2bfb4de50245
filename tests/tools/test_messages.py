"""docs/messages.md lists every reason of an error, with its gRPC code and HTTP status."""

import re
from collections.abc import Iterator
from pathlib import Path

import services.errors
import services.frontend  # This import defines all errors of the front end.
from services.http.errors import status_of
from shared.errors import QuireError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "messages.md"
_ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| (\d+) \| (.+?) \| (.+?) \| (?:yes|no) \|$", re.MULTILINE)


def _errors(base: type[QuireError]) -> Iterator[type[QuireError]]:
    """Yield a class of errors and all that derive from it."""
    yield base
    for each in base.__subclasses__():
        yield from _errors(each)


def test_every_reason_is_listed_with_its_codes() -> None:
    """The page has one row per reason; code and status match what clients get."""
    classes = list(_errors(QuireError))
    of_reason = {each.reason: (each.code, str(status_of(each.__new__(each)))) for each in classes}
    rows = _ROW.findall(PAGE.read_text("utf-8"))

    assert services.errors.RequestCancelledError in classes
    assert {reason: (code, status) for reason, code, status, *_ in rows} == of_reason
    assert len(rows) == len(of_reason)
