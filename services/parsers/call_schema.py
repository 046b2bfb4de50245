"""Converts schemas of arguments for use in grammars.

Many clients omit `additionalProperties`. By default, this permits any property, so weak models invent arguments. In the
grammar, an object with listed properties therefore has no other properties, unless the schema explicitly allows them.
Annotations are omitted, because a grammar ignores them and descriptions can be long.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

JsonObject = dict[str, Any]

DEFINITIONS = ("$defs", "definitions")
"""Keywords that contain the schemas to which references point."""
_ANNOTATIONS = {"$comment", "$schema", "default", "deprecated", "description", "examples", "title"}
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
"""Keywords in whose presence `properties` does not list all properties."""
_PLAIN = _ANNOTATIONS | {
    "type",
    "anyOf",
    "oneOf",
    "$ref",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
}
"""Keywords of schemas whose strings can be found."""
_MAPS = {"properties", *DEFINITIONS}
_PARTS = {"allOf", "anyOf", "oneOf"}


class NotWritableError(Exception):
    """Values of a schema cannot be written in the format."""


def closed(schema: Mapping[str, Any]) -> JsonObject:
    """Return the schema without annotations, and without properties that it does not list.

    Parts of combined schemas remain open.
    """
    return _closed(schema, is_part=False)


def _closed(schema: Mapping[str, Any], *, is_part: bool) -> JsonObject:
    result: JsonObject = {}
    for key, value in schema.items():
        if key in _ANNOTATIONS:
            continue
        if key in _MAPS and isinstance(value, dict):
            result[key] = {name: _closed_if_object(each) for name, each in value.items()}
        elif key in _PARTS and isinstance(value, list):
            result[key] = [_closed_if_object(each, is_part=True) for each in value]
        elif key == "items":
            result[key] = _closed_if_object(value)
        else:
            result[key] = value
    if not is_part and isinstance(result.get("properties"), dict) and not _COMBINING & result.keys():
        result["additionalProperties"] = False
    return result


def _closed_if_object(schema: object, *, is_part: bool = False) -> object:
    return _closed(schema, is_part=is_part) if isinstance(schema, dict) else schema


def without_text(schema: Mapping[str, Any], text: str) -> JsonObject:
    """Return a schema for the values whose strings do not contain a text.

    Args:
        schema: the schema; its references are kept.
        text: the text, whose first character is in it only once.

    Raises:
        NotWritableError: the schema allows strings in unknown places.
    """
    result = dict(schema)
    if text in json.dumps([schema.get("enum"), schema.get("const"), [*schema.get("properties", ())]]):
        raise NotWritableError
    if "enum" in schema or "const" in schema or "$ref" in schema:
        return result
    types = schema.get("type", ())
    types = (types,) if isinstance(types, str) else types
    parts = _PARTS & schema.keys()
    if not schema.keys() <= _PLAIN or not (types or parts) or schema.get("additionalProperties"):
        raise NotWritableError
    for key in parts:
        result[key] = [without_text(_object(each), text) for each in schema[key]]
    if "string" in types:
        result["pattern"] = _pattern_without(text)
    if "array" in types:
        result["items"] = without_text(_object(schema.get("items")), text)
    if "object" in types:
        properties = _object(schema.get("properties"))
        result["properties"] = {key: without_text(_object(each), text) for key, each in properties.items()}
    return result


def _object(schema: object) -> JsonObject:
    if not isinstance(schema, dict):
        raise NotWritableError
    return schema


def _pattern_without(text: str) -> str:
    """Return a regular expression for strings that do not contain a text.

    After the first character of the text, a string may repeat a part of the text, but must then continue with a
    different character than the text: with the first character again, or with a character after which the search
    restarts.
    """
    first = re.escape(text[0])
    begun = [re.escape(text[1:end]) for end in range(1, len(text))]
    again = "|".join(each + first for each in begun)
    other = "|".join(f"{each}[^{first}{re.escape(text[end])}]" for end, each in enumerate(begun, 1))
    return f"^(?:[^{first}]|{first}(?:{again})*(?:{other}))*(?:{first}(?:{again})*(?:{'|'.join(begun)}))?$"
