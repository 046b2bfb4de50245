"""JSON text from other parties: its value, and descriptions of errors without the parser's own wording."""

import json
from typing import Any


def read_json_text(text: str, *, strict: bool = True) -> Any:
    r"""Return the value of JSON text, in which every string is valid Unicode.

    JSON can escape one half of a surrogate pair, such as `"\ud83d"`; a model whose output is truncated writes this.
    Such a half is no character and cannot be encoded. It becomes U+FFFD.

    Args:
        text: the text.
        strict: refuse control characters in strings.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: it is nested too deeply.
    """
    value = json.loads(text, strict=strict)
    if "\\ud" not in text and "\\uD" not in text:
        return value
    written = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.loads(written, strict=strict)


def describe_json_error(error: ValueError) -> str:
    """Describe why `json.loads` failed: "invalid JSON at line 1 column 5"."""
    match error:
        case json.JSONDecodeError():
            return f"invalid JSON at line {error.lineno} column {error.colno}"
        case UnicodeDecodeError():
            return "invalid JSON: not UTF-8 text"
    return "invalid JSON: a number has too many digits"
