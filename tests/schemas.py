"""Generated JSON schemas: nested objects, arrays, enums, patterns, bounds, alternatives and references.

The schemas limit the output's length, so that it always ends before the context does.
"""

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "tags", "city", "größe", "a b", 'quo"te', "items", "id", "kind", "note")
_PATTERNS = (r"^[a-z]{2,5}$", r"^\d{3}-\d{2}$", r"^(red|green|blue)$", r"^[A-Z][a-z]{1,4}\d?$", r"^x[0-9a-f]{4}$")
_DEFINITIONS = {
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"enum": [1, 2, 3]}},
        "required": ["x", "y"],
        "additionalProperties": False,
    },
    "word": {"type": "string", "pattern": "^[a-z]{1,6}$"},
    "tree": {
        "type": "object",
        "properties": {
            "value": {"type": "boolean"},
            "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    },
    "leaf": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
}


def make_schemas(count: int, seed: int = 1) -> list[Schema]:
    """`count` different schemas; the same ones for the same seed."""
    rng = random.Random(seed)
    found: dict[str, Schema] = {}
    while len(found) < count:
        schema = _object(rng, 3) | {"$defs": _DEFINITIONS}
        found[json.dumps(schema)] = schema
    return list(found.values())


def _schema(rng: random.Random, depth: int) -> Schema:
    makers: list[Callable[[random.Random, int], Schema]] = [_enum, _pattern, _string, _integer, _simple, _reference]
    if depth:
        makers += [_object, _array, _alternatives]
    return rng.choice(makers)(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 1)
    return {"type": "array", "items": _schema(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _alternatives(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_schema(rng, depth) for _ in range(2)]}


def _enum(rng: random.Random, _depth: int) -> Schema:
    return {"enum": rng.sample(["red", "dark blue", 7, -1.5, None, True, "ü", ["a"], {"b": 1}], 3)}


def _pattern(rng: random.Random, _depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _string(rng: random.Random, _depth: int) -> Schema:
    least = rng.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}


def _integer(rng: random.Random, _depth: int) -> Schema:
    least = rng.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 1000)}


def _simple(rng: random.Random, _depth: int) -> Schema:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": "fixed"}])


def _reference(rng: random.Random, _depth: int) -> Schema:
    return {"$ref": f"#/$defs/{rng.choice(sorted(_DEFINITIONS))}"}
