"""Calls of tools: what is asked of the model, and what is read out of its text."""

import json
from itertools import pairwise

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http.schema import FunctionDefinition
from services.http.tool_calls import (
    AnswerParser,
    CallArguments,
    CallBegun,
    Content,
    ForcedCalls,
    HermesCalls,
    JsonCalls,
    forced_calls,
    style_of,
)

WORDS = st.text(st.sampled_from('ab {}[]"\\:,<>/\n é'), max_size=12)
VALUES = st.recursive(
    WORDS | st.integers() | st.booleans(), lambda v: st.lists(v) | st.dictionaries(WORDS, v), max_leaves=5
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["add", "get_weather"]), st.dictionaries(WORDS, VALUES)), min_size=1, max_size=3
)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def read(parser: AnswerParser, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, object]]]:
    """Content and calls of a text that arrives in pieces."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [piece for begin, end in pairwise(edges) for piece in parser.push(text[begin:end])] + parser.finish()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    names = [piece.name for piece in pieces if isinstance(piece, CallBegun)]
    assert [piece.index for piece in pieces if isinstance(piece, CallBegun)] == list(range(len(names)))
    texts = [
        "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == n) for n in range(len(names))
    ]
    return content, list(zip(names, map(json.loads, texts), strict=True))


@given(calls=CALLS, cuts=CUTS, ascii_only=st.booleans())
def test_forced_calls_are_read_however_they_are_cut(
    calls: list[tuple[str, dict[str, object]]], cuts: list[int], ascii_only: bool
) -> None:
    """The array that a grammar makes the model write gives its calls, whatever is in their strings."""
    array = [{"name": name, "parameters": arguments} for name, arguments in calls]
    content, found = read(ForcedCalls(), json.dumps(array, ensure_ascii=ascii_only), cuts)

    assert content == ""
    assert found == calls


@given(calls=CALLS, cuts=CUTS, before=st.sampled_from(["", "Let me see.", "a < b", "<tool"]), name_last=st.booleans())
def test_tagged_calls_are_read_among_text(
    calls: list[tuple[str, dict[str, object]]], cuts: list[int], before: str, name_last: bool
) -> None:
    """Text before tags is content, what is between them a call, in either order of its keys."""
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    if name_last:
        objects = [dict(reversed(each.items())) for each in objects]
    text = before + "\n" + "\n".join(f"<tool_call>\n{json.dumps(each)}\n</tool_call>" for each in objects) + "\n"
    content, found = read(HermesCalls(), text, cuts)

    assert content == before
    assert found == calls


@given(text=st.text(st.sampled_from("<tool_cal>/ ab"), max_size=40), cuts=CUTS)
def test_text_without_calls_is_content(text: str, cuts: list[int]) -> None:
    """Nothing is lost of an answer that only looks as if it might call."""
    content, found = read(HermesCalls(), text, cuts)

    assert content == text
    assert found == []


@given(calls=CALLS, cuts=CUTS)
def test_answers_that_are_json_are_calls(calls: list[tuple[str, dict[str, object]]], cuts: list[int]) -> None:
    """Objects with a name are calls; another beginning makes the answer text."""
    text = "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)

    assert read(JsonCalls(), text, cuts) == ("", calls)
    assert read(JsonCalls(), f"Well: {text}", cuts) == (f"Well: {text}", [])
    assert read(JsonCalls(), '{"city": 1}', cuts) == ('{"city": 1}', [])


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


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ('{% if tools %}{"name": "f", "parameters": {}}{% endif %}', "llama3_json"),
        ("{{ messages }}", ""),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, style: str) -> None:
    """The form of calls is read off the chat template; one that knows no tools writes none."""
    assert style_of(template) == style
