"""Functions that a model may call, read from the tools of a chat in OpenAI's form."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,256}")


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    strict: bool = False
    """Whether the arguments of every call must follow the schema."""


def read_functions(tools: Iterable[Any]) -> list[Function | None]:
    """Return each tool's function: {"type": "function", "function": {"name": …, …}}; None for any other form."""
    return [_read(tool.get("function")) for tool in tools]


def _read(function: object) -> Function | None:
    if not isinstance(function, dict):
        return None
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    return Function(name, parameters if isinstance(parameters, dict) else {}, function.get("strict") is True)
