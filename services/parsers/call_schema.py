"""Schema of tool calls as a JSON array, which a grammar can force on every model.

The output is an array of {"name", "parameters"}, each following its function's schema.

A model may add a property to any object that does not forbid it. Many clients leave `additionalProperties` out, and a
weak model then invents arguments. So an object that lists its properties has no others here, unless the schema says so.
"""

from collections.abc import Sequence
from typing import Any

from services.parsers.functions import Function

JsonObject = dict[str, Any]

_COMBINING = {
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
}
"""Keywords beside which `properties` does not list all properties."""


def schema_of_calls(functions: Sequence[Function], *, parallel: bool) -> JsonObject:
    """Return the JSON schema of an answer that calls at least one function; exactly one if not `parallel`."""
    definitions: JsonObject = {}
    items = [_call_schema(function, number, definitions) for number, function in enumerate(functions)]
    schema: JsonObject = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": [*items]}}
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _call_schema(function: Function, number: int, definitions: JsonObject) -> JsonObject:
    parameters = dict(function.parameters or {"type": "object"})
    for keyword in ("$defs", "definitions"):
        own = parameters.pop(keyword, None)
        if isinstance(own, dict):
            # References are relative to the root of the schema, and this schema is no longer the root.
            definitions.update({f"{number}.{name}": _closed(_moved(each, number)) for name, each in own.items()})
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": _closed(_moved(parameters, number))},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _closed(schema: JsonObject) -> JsonObject:
    """Return the schema without properties that it does not list. Parts of combined schemas remain open."""
    closed = dict(schema)
    properties, items = closed.get("properties"), closed.get("items")
    if isinstance(properties, dict):
        closed["properties"] = {
            name: _closed(each) if isinstance(each, dict) else each for name, each in properties.items()
        }
        if not _COMBINING & closed.keys():
            closed["additionalProperties"] = False
    if isinstance(items, dict):
        closed["items"] = _closed(items)
    return closed


def _moved(schema: object, number: int) -> JsonObject:
    """Return the schema with its references adjusted to the new place of the definitions."""
    moved = _move(schema, number)
    return moved if isinstance(moved, dict) else {}


def _move(node: object, number: int) -> object:
    if isinstance(node, list):
        return [_move(each, number) for each in node]
    if not isinstance(node, dict):
        return node
    return {key: _reference(each, number) if key == "$ref" else _move(each, number) for key, each in node.items()}


def _reference(target: object, number: int) -> object:
    for prefix in ("#/$defs/", "#/definitions/"):
        if isinstance(target, str) and target.startswith(prefix):
            return f"#/$defs/{number}.{target[len(prefix) :]}"
    return target
