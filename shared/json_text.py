"""Descriptions of JSON errors in external input, without the parser's own wording."""

import json


def describe_json_error(error: ValueError) -> str:
    """Describe why `json.loads` failed: "invalid JSON at line 1 column 5"."""
    match error:
        case json.JSONDecodeError():
            return f"invalid JSON at line {error.lineno} column {error.colno}"
        case UnicodeDecodeError():
            return "invalid JSON: not UTF-8 text"
    return "invalid JSON: a number has too many digits"
