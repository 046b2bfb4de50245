"""A tool, and an errand: a question that one call to a tool answers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = str | int

MOST_DESCRIPTION = 100
"""Characters of a description that the chat template shows."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` are pairs of a name and a JSON type."""

    name: str
    description: str
    parameters: tuple[tuple[str, str], ...]

    @property
    def line(self) -> str:
        """The tool as the chat template shows it."""
        signature = f"{self.name}({','.join(f'{name}:{kind}' for name, kind in self.parameters)})"
        return f"{self.description} -> {signature}" if self.description else signature

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's API."""
        schema = {
            "type": "object",
            "properties": {name: _schema(kind) for name, kind in self.parameters},
            "required": [name for name, _ in self.parameters],
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


@dataclass(frozen=True, slots=True)
class Errand:
    """A question that one call to `tool` answers.

    `subject` is what the question is about; two tools with one subject compete. `held_out` means that the errand is
    reserved for evaluation. `tool_seed` determines the tool.
    """

    tool: Tool
    subject: str
    question: str
    arguments: tuple[tuple[str, Value], ...]
    result: str
    answer: str
    held_out: bool
    tool_seed: int = 0

    def call(self, *, compact: bool = False, key: str = "arguments") -> str:
        """Return the call as JSON."""
        separators = (",", ":") if compact else (", ", ": ")
        return json.dumps(
            {"name": self.tool.name, key: dict(self.arguments)}, ensure_ascii=False, separators=separators
        )


def answer_to(result: Any, otherwise: str) -> str:
    """Return an answer that states a tool's result; `otherwise` is the answer for a plain value.

    A sentence is repeated. The members of an object are listed.
    """
    if isinstance(result, Mapping):
        parts = [f"the {key} is {value}" for key, value in result.items()]
        listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
        return f"T{listed[1:]}."
    return str(result) if str(result)[-1:] in (".", "!", "?") else otherwise


def _schema(kind: str) -> dict[str, Any]:
    return {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}
