"""Writes JSON in short pieces, so that a long answer can be written in slices."""

import json
from collections.abc import Iterator
from typing import Any

_SLICE = 256
"""Number of scalar list items in one piece."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def json_pieces(value: Any) -> Iterator[str]:
    """Yield the JSON text of a value piece by piece."""
    if isinstance(value, dict) and any(isinstance(each, dict | list) for each in value.values()):
        before = "{"
        for key, each in value.items():
            yield f"{before}{_encode(str(key))}:"
            yield from json_pieces(each)
            before = ","
        yield "}"
    elif isinstance(value, list) and len(value) > 1:
        before = "["
        for start in range(0, len(value), _SLICE):
            part = value[start : start + _SLICE]
            if any(isinstance(each, dict | list) for each in part):
                for each in part:
                    yield before
                    yield from json_pieces(each)
                    before = ","
            else:
                yield before + _encode(part)[1:-1]
                before = ","
        yield "]"
    else:
        yield _encode(value)
