"""Parses and validates request bodies. Errors use the client's field names."""

import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import jiter
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.http.schema import JSON_BUDGET, MAX_JSON_VALUES, Body
from services.requests.validation import MAX_TOKEN_IDS
from shared.errors import FieldViolation, InvalidRequestError

MAX_VIOLATIONS = 8
"""Maximum number of violations in one answer."""
_MAX_ERRORS = 64
"""Maximum number of errors that are described. In addition, lists and objects stop at their first error."""
_MAX_VALUES = MAX_TOKEN_IDS + (1 << 18)
"""Maximum number of values in a body: the longest possible prompt and the other fields."""
_MAX_QUOTES = 1 << 18
"""Maximum number of quotes around strings in a body; each string has two."""

# Map pydantic's error types to messages of our own, because pydantic's messages contain names of Python types and
# validators.
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
    "too_many_fields": "must have at most {max_length} fields, not {actual_length}",
    "too_many_values": "must have at most {max_length} values",
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
_JSON_WORDS = {"True": "true", "False": "false"}
_SHOWN_KEY = 64
"""Maximum number of characters shown for an unknown or duplicate key in an error."""

BodyT = TypeVar("BodyT", bound=Body)


def parse(kind: type[BodyT], raw: bytes) -> BodyT:
    """Return the parsed body.

    Raises:
        InvalidRequestError: the body is invalid; the violations name the fields.
    """
    return checked(kind, _document(raw), many_values=raw.count(b",") > MAX_JSON_VALUES)


def checked(kind: type[BodyT], document: object, *, many_values: bool = False) -> BodyT:
    """Return the body for a JSON value; `many_values`: it may have more than MAX_JSON_VALUES.

    Raises:
        InvalidRequestError: a field is invalid.
    """
    if not isinstance(document, dict):
        raise InvalidRequestError(FieldViolation("body", "must be a JSON object"))
    try:
        return kind.model_validate(document, context={JSON_BUDGET: [2 * MAX_JSON_VALUES] if many_values else None})
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[:_MAX_ERRORS]
        raise InvalidRequestError(*_violations(kind, document, found)) from None


def _document(raw: bytes) -> object:
    """Return the JSON value of a body.

    Duplicate keys are refused, because pydantic would silently use the last value. Commas and quotes are counted first,
    because many small values take far longer to parse than one text of the same size.
    """
    if raw.count(b",") >= _MAX_VALUES or raw.count(b'"') - raw.count(b'\\"') > _MAX_QUOTES:
        what = f"more than {_MAX_VALUES} values or {_MAX_QUOTES // 2} strings; split the request"
        raise InvalidRequestError(FieldViolation("body", what))
    try:
        document: object = jiter.from_json(raw, catch_duplicate_keys=True, allow_inf_nan=False)
    except ValueError as error:
        found = _DUPLICATE.search(str(error))
        if found is None:
            raise InvalidRequestError(FieldViolation("body", _json_description(raw, str(error)))) from None
        what = f"given twice (second at {found[2]}); use it once"
        raise InvalidRequestError(FieldViolation(found[1][:_SHOWN_KEY], what)) from None
    return document


def _violations(kind: type[Body], document: object, errors: Sequence[ErrorDetails]) -> list[FieldViolation]:
    found: dict[str, list[ErrorDetails]] = {}
    for each in errors:
        found.setdefault(_path(each, document), []).append(each)
    # For a field with several alternatives, pydantic reports errors for all of them. Report the alternative with the
    # deepest errors, because the client most likely meant that one. Prefer an alternative with the right type but the
    # wrong size.
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
    """Describe why a body is not JSON. `error` is the parser's message, which ends with the position."""
    if not raw.strip():
        return "empty; send a JSON object"
    reason, _, position = error.rpartition(" at ")
    return f"invalid JSON at {position}: {reason}; send a JSON object in UTF-8"


def _best_matches(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors about values of the right type, or all errors if no alternative has the right type."""
    return [error for error in errors if error["type"] not in _TYPES] or errors


def _joined(descriptions: list[str]) -> str:
    """Return the descriptions of alternatives as one: "must be a string or a list"."""
    first, *others = dict.fromkeys(descriptions)
    return " or ".join([first, *(other.removeprefix("must be ") for other in others)])


def _path(error: ErrorDetails, document: Any) -> str:
    """Return the field's path in the document, pydantic's error location without the names of union members."""
    path, here = "", document
    location = error["loc"]
    missing = len(location) - 1 if error["type"] == "missing" else -1
    for position, step in enumerate(location):
        if isinstance(step, int):
            if isinstance(here, list):
                path += f"[{step}]"
                here = here[step] if step < len(here) else None
        elif isinstance(here, dict) and (step in here or position == missing):
            name = step[:_SHOWN_KEY]
            path += f".{name}" if path else name
            here = here.get(step)
    return path or "body"


def _description(kind: type[Body], error: ErrorDetails) -> str:
    if error["type"] != "extra_forbidden":
        context = {key: _plain(value) for key, value in error.get("ctx", {}).items()}
        if context.get("min_length") == 1:
            return "must not be empty"
        template = _TYPES.get(error["type"]) or _SIZES.get(error["type"]) or _VALUES.get(error["type"])
        return template.format_map(context) if template else "invalid value"
    name, top_level = str(error["loc"][-1]), len(error["loc"]) == 1
    if top_level and name in kind.not_supported:
        return f"not supported; {kind.not_supported[name]}"
    could_be_misspelt = top_level and len(name) <= _SHOWN_KEY
    close = difflib.get_close_matches(name, kind.model_fields, n=1) if could_be_misspelt else []
    return f"unknown field; did you mean {close[0]!r}?" if close else "unknown field; remove it"


def _plain(value: object) -> object:
    """Return a value in JSON notation: 0 rather than 0.0, and false rather than False."""
    if isinstance(value, str):
        return _JSON_WORDS.get(value, value)
    return int(value) if isinstance(value, float) and value.is_integer() else value
