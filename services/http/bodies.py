"""From the bytes of a body to a checked one, or to an error that names the field as its sender wrote it."""

import difflib
from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from services.http.schema import NOT_SUPPORTED, Body
from shared.errors import FieldViolation, InvalidRequestError

MAX_VIOLATIONS = 8

BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """The body.

    Raises:
        InvalidRequestError: names what is wrong.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError(
            *_violations(kind, raw, error.errors(include_url=False, include_input=False))
        ) from None


def _violations(kind: type[Body], raw: bytes, errors: Sequence[ErrorDetails]) -> list[FieldViolation]:
    found: dict[str, list[str]] = {}
    try:
        document = from_json(raw)
    except ValueError as error:
        return [FieldViolation("body", f"is no valid JSON: {error}")]
    if not isinstance(document, dict):
        return [FieldViolation("body", "must be a JSON object")]
    for each in errors:
        descriptions = found.setdefault(_path(each, document), [])
        description = _description(kind, each)
        if description not in descriptions:
            descriptions.append(description)
    # Of a place that may hold one thing or another, all alternatives complain; the one that came further is meant. One
    # that only finds a list too long had nothing else to say.
    too_long = {_path(each, document): each for each in errors if each["type"] == "too_long"}
    for path, each in too_long.items():
        found[path] = [_description(kind, each)]
    beside = tuple(f"{path}[" for path in too_long)
    found = {path: texts for path, texts in found.items() if not path.startswith(beside)}
    vague = {path for path in found for other in found if other.startswith((f"{path}[", f"{path}."))}
    told = [FieldViolation(path, "; or ".join(texts)) for path, texts in found.items() if path not in vague]
    return told[:MAX_VIOLATIONS]


def _path(error: ErrorDetails, document: Any) -> str:
    """The place in the document: pydantic's location without the names of the alternatives that it tried."""
    path, here = "", document
    location = error["loc"]
    missing = len(location) - 1 if error["type"] == "missing" else -1
    for position, step in enumerate(location):
        if isinstance(step, int):
            if isinstance(here, list):
                path += f"[{step}]"
                here = here[step] if step < len(here) else None
        elif isinstance(here, dict) and (step in here or position == missing):
            path += f".{step}" if path else step
            here = here.get(step)
    return path or "body"


def _description(kind: type[Body], error: ErrorDetails) -> str:
    if error["type"] != "extra_forbidden":
        message = error["msg"]
        return message[:1].lower() + message[1:]
    name = str(error["loc"][-1])
    if len(error["loc"]) == 1 and name in NOT_SUPPORTED:
        return f"not supported: {NOT_SUPPORTED[name]}"
    close = difflib.get_close_matches(name, kind.model_fields, n=1) if len(error["loc"]) == 1 else []
    return "there is no such field" + (f"; did you mean {close[0]!r}?" if close else "; leave it out")
