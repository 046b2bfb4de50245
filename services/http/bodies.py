"""Parses and checks request bodies; errors name the field as the client wrote it."""

import difflib
import json
import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jiter
from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from services.http.schema import NOT_SUPPORTED, Body
from shared.errors import FieldViolation, InvalidRequestError

MAX_VIOLATIONS = 8
"""Maximum number of violations in one answer."""

# Messages by pydantic's type of error. Its own messages name Python types and validators.
_TYPES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "float_type": "must be a number",
    "int_from_float": "must be an integer",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
}
"""Messages for a value of the wrong type."""
_SIZES = {
    "too_long": "must have at most {max_length} items, not {actual_length}",
    "too_short": "must have at least {min_length} items, not {actual_length}",
}
"""Messages for a list of the wrong length."""
_VALUES = {
    "finite_number": "must be a finite number",
    "greater_than": "must be > {gt}",
    "greater_than_equal": "must be >= {ge}",
    "int_parsing_size": "has too many digits",
    "less_than": "must be < {lt}",
    "less_than_equal": "must be <= {le}",
    "missing": "missing; it is required",
    "string_pattern_mismatch": "must match {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}",
    "union_tag_not_found": "{discriminator} is missing; it is required",
    "unsupported_part": "parts of type {kind!r} are not supported, because the server reads text only; send text parts",
}
"""Messages for a missing value, or one that is out of range."""

_DUPLICATE = re.compile(r'key "(.*)" at (line \d+ column \d+)$', re.DOTALL)
"""Matches the message of the parser about a duplicate key."""
_LARGE_NUMBER = re.compile(rb"[0-9][eE]\+?[0-9]{3}|[0-9]{309}")
"""Matches a number that may be too large for a float."""
_SHOWN_KEY = 64
"""Characters of a duplicate key that an error repeats."""

BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Return the parsed body.

    Raises:
        InvalidRequestError: the body is invalid; the violations name the fields.
    """
    try:
        body = kind.model_validate_json(raw)
    except ValidationError as error:
        raise InvalidRequestError(
            *_violations(kind, raw, error.errors(include_url=False, include_input=False))
        ) from None
    _refuse_duplicates(raw)
    return body


def checked(kind: type[BodyT], content: dict[str, Any]) -> BodyT:
    """Return a body of one API that was made from a body of another.

    Raises:
        InvalidRequestError: a field is invalid.
    """
    return parse(kind, json.dumps(content).encode())


def _refuse_duplicates(raw: bytes) -> None:
    """Refuse a valid body in which an object has a key twice; pydantic keeps the last one silently.

    Numbers that are not finite are refused as well; pydantic accepts them in fields of any JSON.
    """
    try:
        document = jiter.from_json(raw, catch_duplicate_keys=True, allow_inf_nan=False)
    except ValueError as error:
        found = _DUPLICATE.search(str(error))
        if found is None:
            raise InvalidRequestError(FieldViolation("body", _json_description(raw, str(error)))) from None
        what = f"given twice (second at {found[2]}); give it once"
        raise InvalidRequestError(FieldViolation(found[1][:_SHOWN_KEY], what)) from None
    if _LARGE_NUMBER.search(raw) and _has_infinity(document):
        raise InvalidRequestError(FieldViolation("body", "contains a number that is too large; give finite numbers"))


def _has_infinity(value: object) -> bool:
    """Return whether a JSON value contains a number that is too large for a float."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            pending += each.values()
        elif isinstance(each, list):
            pending += each
        elif isinstance(each, float) and math.isinf(each):
            return True
    return False


def _violations(kind: type[Body], raw: bytes, errors: Sequence[ErrorDetails]) -> list[FieldViolation]:
    try:
        document = from_json(raw)
    except ValueError as error:
        return [FieldViolation("body", _json_description(raw, str(error)))]
    if not isinstance(document, dict):
        return [FieldViolation("body", "must be a JSON object")]
    found: dict[str, list[ErrorDetails]] = {}
    for each in errors:
        found.setdefault(_path(each, document), []).append(each)
    # A field with several alternatives has the errors of all of them. The alternative with the deepest errors is the
    # intended one. An alternative with the right type and the wrong size takes precedence.
    sized = tuple(f"{path}[" for path, each in found.items() if any(error["type"] in _SIZES for error in each))
    found = {path: each for path, each in found.items() if not path.startswith(sized)}
    vague = {path for path in found for other in found if other.startswith((f"{path}[", f"{path}."))}
    violations = [
        FieldViolation(path, _joined([_description(kind, error) for error in _best_matches(each)]))
        for path, each in found.items()
        if path not in vague
    ]
    return violations[:MAX_VIOLATIONS]


def _json_description(raw: bytes, error: str) -> str:
    """Describe why a body is not JSON; `error` is the parser's message, which ends with the position."""
    if not raw.strip():
        return "empty; send a JSON object"
    return f"invalid JSON at {error.rpartition(' at ')[2]}"


def _best_matches(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors about values of the right type, or all errors if no alternative has the right type."""
    return [error for error in errors if error["type"] not in _TYPES] or errors


def _joined(descriptions: list[str]) -> str:
    """Return the descriptions of alternatives as one: "must be a string or a list"."""
    first, *others = dict.fromkeys(descriptions)
    return " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _path(error: ErrorDetails, document: Any) -> str:
    """Return the field's path in the document: pydantic's location of the error, without the names of union members."""
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
    name, top_level = str(error["loc"][-1]), len(error["loc"]) == 1
    if error["type"] != "extra_forbidden":
        context = {key: _plain(value) for key, value in error.get("ctx", {}).items()}
        if context.get("min_length") == 1:
            return "must not be empty"
        template = _TYPES.get(error["type"]) or _SIZES.get(error["type"]) or _VALUES.get(error["type"])
        return template.format_map(context) if template else "invalid value"
    if top_level and name in NOT_SUPPORTED:
        return f"not supported; {NOT_SUPPORTED[name]}"
    close = difflib.get_close_matches(name, kind.model_fields, n=1) if top_level else []
    return f"unknown field; did you mean {close[0]!r}?" if close else "unknown field; remove it"


def _plain(value: object) -> object:
    """Return a bound as a client would write it: 0 rather than 0.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
