"""The schema of tool calls that a grammar forces."""

import jsonschema

from services.parsers import Function, schema_of_calls
from services.parsers.call_schema import JsonObject


def test_the_schema_of_forced_calls_accepts_calls_only() -> None:
    """The schema of forced calls accepts a call of each function, and rejects wrong names, wrong arguments and no call.

    The definitions of two functions are not mixed.
    """
    functions = [
        Function(
            name=name,
            parameters={"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": kind}}},
        )
        for name, kind in (("count", "integer"), ("say", "string"))
    ]
    schema = schema_of_calls(functions, parallel=True)

    def valid(*calls: object) -> bool:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(list(calls)))

    assert valid({"name": "count", "parameters": {"x": 1}}, {"name": "say", "parameters": {"x": "hello"}})
    assert not valid({"name": "count", "parameters": {"x": "hello"}})
    assert not valid({"name": "shout", "parameters": {}})
    assert not valid()
    assert schema_of_calls(functions, parallel=False)["maxItems"] == 1


def test_a_call_has_only_arguments_that_the_function_lists() -> None:
    """Objects are closed, also nested ones, unless the schema itself permits more or combines schemas."""
    inner: JsonObject = {"type": "object", "properties": {"a": {"type": "string"}}}
    parameters: JsonObject = {
        "type": "object",
        "properties": {
            "item": inner,
            "items": {"type": "array", "items": inner},
            "free": inner | {"additionalProperties": {"type": "integer"}},
            "both": {"allOf": [inner, {"required": ["b"]}]},
            "any": {"type": "object"},
        },
    }
    schema = schema_of_calls([Function(name="f", parameters=parameters)], parallel=True)

    def valid(**arguments: object) -> bool:
        call = {"name": "f", "parameters": arguments}
        return bool(jsonschema.Draft202012Validator(schema).is_valid([call]))

    assert valid(item={"a": "x"}, items=[{"a": "x"}], free={"a": "x", "b": 1}, both={"a": "x", "b": 1}, any={"b": 1})
    assert not valid(other=1)
    assert not valid(item={"b": 1})
    assert not valid(items=[{"b": 1}])
    assert not valid(free={"b": "x"})
