"""The schema of tool calls that a grammar forces."""

import jsonschema

from services.http.schema import FunctionDefinition
from services.http.tool_calls import forced_calls


def test_the_schema_of_forced_calls_accepts_calls_only() -> None:
    """The schema of forced calls accepts a call of each function, and rejects wrong names, wrong arguments and no call.

    The definitions of two functions are not mixed.
    """
    functions = [
        FunctionDefinition(
            name=name,
            parameters={"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": kind}}},
        )
        for name, kind in (("count", "integer"), ("say", "string"))
    ]
    schema = forced_calls(functions, parallel=True)

    def valid(*calls: object) -> bool:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(list(calls)))

    assert valid({"name": "count", "parameters": {"x": 1}}, {"name": "say", "parameters": {"x": "hello"}})
    assert not valid({"name": "count", "parameters": {"x": "hello"}})
    assert not valid({"name": "shout", "parameters": {}})
    assert not valid()
    assert forced_calls(functions, parallel=False)["maxItems"] == 1
