"""Call grammars: in every permitted output, the family's parser finds calls that follow their schemas."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with these characters)

import json
import random
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from services.parsers import (
    FAMILIES,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Function,
    ModelFormat,
    OutputParser,
    grammar_of_calls,
)
from services.text.tokenizer import TextTokenizer
from shared.grammars import GrammarTokenizer, check_matcher, compile_grammar, lark_of_ebnf
from tests.examples import examples

TOKENIZER = Path("shared/demo_model/tokenizer.json")
EOS = 2
TEMPLATES = {
    "mistral": ("tools [TOOL_CALLS]", "tools [TOOL_CALLS] [ARGS] [THINK]"),
    "deepseek": ("tools <｜tool▁call▁begin｜>", "tools <｜tool▁call▁begin｜> ```json <think>"),
    "gemma4": ("tools", "tools <|channel>"),
}
"""Contents of a family's templates that affect its format; by default, whether they have reasoning."""
FORMATS = [
    (name, template, kind)
    for name in FAMILIES
    for template in TEMPLATES.get(name, ("tools", "tools <think>"))
    for kind in ("letters", "added", "special")
]
"""Families with template variants, and whether their markers are single tokens or several."""
ENDS = ('"', '"}', "}", "]", ")", '")', "\n", ", ", "1", "e", "</parameter>")
"""Texts that a random walk tries often, so that it ends."""

TEXTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "description": "any (text", "default": ""},
    {"type": "string", "enum": ["a b", "c", "42", "</x>"]},
    {"type": "string", "maxLength": 4},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Optional"},
]
OTHERS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "null"},
    {"const": "fixed"},
    {"enum": [True, None, "x", 1.5]},
    {"$ref": "#/$defs/word"},
    {},
]
DEFINITIONS = {"word": {"enum": ["yes", "no"], "description": "a word"}}
VALUES = st.recursive(
    st.sampled_from(TEXTS + OTHERS),
    lambda inner: (
        st.builds(lambda item: {"type": "array", "items": item, "maxItems": 2}, inner)
        | st.builds(
            lambda key, value: {"type": "object", "properties": {key: value}},
            st.sampled_from(["k", "description"]),
            inner,
        )
    ),
    max_leaves=3,
)
KEYS = st.sampled_from(["s", "text", "n_1", "x-y", "class", "a b", "größe", "name", "arguments", "input"])
NAMES = st.sampled_from(["f", "look.up", "get_weather", "x-1", "function", "functions.f", "None", "a"])


@st.composite
def functions(draw: st.DrawFn) -> list[Function]:
    """Draw functions with schemas as clients send them."""
    found = []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        properties = draw(st.dictionaries(KEYS, VALUES, max_size=4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": [key for key in properties if draw(st.booleans())],
            "$defs": DEFINITIONS,
        }
        more: dict[str, Any] = draw(
            st.sampled_from([{}, {}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
        )
        found.append(Function(name, draw(st.sampled_from([schema | more, schema | more, {}, {"type": "object"}]))))
    return found


@cache
def tokenizers(name: str, kind: str) -> tuple[Tokenizer, GrammarTokenizer, Mapping[str, int]]:
    """Return the embedded tokenizer with the markers of a family, and its special tokens."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    if kind != "letters":
        special = kind == "special"
        tokenizer.add_tokens([AddedToken(each, normalized=False, special=special) for each in FAMILIES[name].markers])
    with TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        tokenizer.save(str(path))
        grammar_tokenizer = GrammarTokenizer(path, tokenizer.get_vocab_size(), [EOS])
    return tokenizer, grammar_tokenizer, TextTokenizer(tokenizer, None).special_tokens


def _matcher(name: str, kind: str, grammar: str) -> LLMatcher:
    return compile_grammar("lark", lark_of_ebnf(grammar), tokenizers(name, kind)[1])


def _walk(name: str, kind: str, grammar: str, rng: random.Random) -> str | None:
    """Return a random output that a grammar permits; None if it does not end soon."""
    tokenizer = tokenizers(name, kind)[0]
    matcher = _matcher(name, kind, grammar)
    spelled = tokenizers("plain", "letters")[0]
    """Encodes special tokens as letters."""
    markers = [
        each.encode(text, add_special_tokens=False).ids
        for text in FAMILIES[name].markers or FAMILIES["hermes"].markers
        for each in (tokenizer, spelled)
    ]
    ends = [tokenizer.encode(text, add_special_tokens=False).ids for text in ENDS]
    tokens: list[int] = []
    while len(tokens) < 400:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        check_matcher(matcher)
        if EOS in allowed and (len(allowed) == 1 or rng.random() < (0.1 if len(allowed) > 500 else 0.5)):
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        end = rng.choice(markers if rng.random() < 0.6 else ends)
        if rng.random() < 0.8 and (count := matcher.try_consume_tokens(end)):
            tokens += end[:count]
            continue
        token = int(rng.choice([each for each in allowed if each != EOS]))
        tokens.append(token)
        matcher.consume_token(token)
    return None


def _read(name: str, text: str, given: list[Function], *, reasons: bool) -> tuple[list[tuple[str, Any]], str]:
    """Return the calls, all of which are complete, and the content."""
    read = ModelFormat(FAMILIES[name], "", {}).calling_family.read
    parser = OutputParser(read, schemas={each.name: each.parameters for each in given}, reasons=reasons)
    events = [*parser.push(text), *parser.finish()]
    begun = [event for event in events if isinstance(event, CallBegun)]
    assert len(begun) == sum(isinstance(event, CallEnded) for event in events), text
    content = "".join(event.text for event in events if isinstance(event, Content))
    arguments = [
        "".join(event.text for event in events if isinstance(event, CallArguments) and event.index == each.index)
        for each in begun
    ]
    return [(each.name, json.loads(own)) for each, own in zip(begun, arguments, strict=True)], content


@pytest.mark.parametrize("name", FAMILIES)
def test_every_output_of_a_grammar_is_valid_calls(name: str) -> None:
    """Of a random output that a grammar allows, the reader finds complete calls whose arguments follow the schemas.

    A forced output is nothing but calls: one, if only one is allowed.
    """
    found = []

    @settings(max_examples=examples(30), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
    @given(
        variant=st.sampled_from([each for each in FORMATS if each[0] == name]),
        given_functions=functions(),
        required=st.booleans() if FAMILIES[name].calls_tools and FAMILIES[name].marks_calls else st.just(True),
        single=st.booleans(),
        reasons=st.booleans() if FAMILIES[name].think else st.just(False),
        seed=st.integers(0, 2**32),
    )
    def check(
        variant: tuple[str, str, str],
        given_functions: list[Function],
        required: bool,
        single: bool,
        reasons: bool,
        seed: int,
    ) -> None:
        _, template, kind = variant
        model_format = ModelFormat(FAMILIES[name], template, tokenizers(name, kind)[2])
        grammar = grammar_of_calls(model_format, given_functions, required=required, single=single, reasons=reasons)
        text = _walk(name, kind, grammar, random.Random(seed))
        assume(text is not None)
        assert text is not None
        calls, content = _read(name, text, given_functions, reasons=reasons)

        assert not required or (calls and not content), text
        assert not single or len(calls) <= 1, text
        schemas = {each.name: each.parameters for each in given_functions}
        for called, arguments in calls:
            jsonschema.validate(arguments, schemas[called])
        found.extend(calls)

    check()
    assert found


SHAPES = [
    ("hermes", "tools", '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 1}}\n</tool_call>'),
    (
        "qwen3_coder",
        "tools",
        "<tool_call>\n<function=f>\n<parameter=s>\nx\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    ("llama3_json", "tools", '{"name": "f", "parameters": {"s": "x", "n": 1}}'),
    ("pythonic", "tools", '[f(s="x", n=1)]'),
    ("mistral", "tools", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "x", "n": 1}}]'),
    ("mistral", "tools [ARGS]", '[TOOL_CALLS]f[ARGS]{"s": "x", "n": 1}'),
    (
        "deepseek",
        "tools ```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"s": "x", "n": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    (
        "deepseek",
        "tools",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x", "n": 1}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    (
        "harmony",
        "tools",
        "<|channel|>analysis<|message|>well<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"s": "x", "n": 1}',
    ),
    (
        "glm4",
        "tools <think>",
        "<think>well</think>\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n"
        "<arg_value>1</arg_value>\n</tool_call>",
    ),
    ("granite", "tools", '<|tool_call|>[{"name": "f", "arguments": {"s": "x", "n": 1}}]'),
    (
        "gemma4",
        "tools <|channel>",
        '<|channel>thought\nwell<channel|><|tool_call>call:f{s:<|"|>x<|"|>,n:1}<tool_call|>',
    ),
    ("plain", "tools", '<tool_call>\n{"name": "f", "arguments": {"s": "x", "n": 1}}\n</tool_call>'),
]
"""A call of f as the vendor describes it, by family and template."""


@pytest.mark.parametrize("kind", ["letters", "added", "special"])
@pytest.mark.parametrize(("name", "template", "text"), SHAPES)
def test_a_forced_call_has_the_shape_of_a_free_one(name: str, template: str, text: str, kind: str) -> None:
    """The grammar of a forced call accepts a call as the vendor describes it, with reasoning before it."""
    tokenizer, _, special = tokenizers(name, kind)
    function = Function("f", {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}, "required": ["s"]})
    model_format = ModelFormat(FAMILIES[name], template, special)
    grammar = grammar_of_calls(model_format, [function], required=True, single=True, reasons=False)
    matcher = _matcher(name, kind, grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids

    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize("kind", ["letters", "added", "special"])
@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_are_those_of_the_library(name: str, kind: str) -> None:
    """A token that the library matches by its id only is known as such, and no other one is."""
    tokenizer, grammar_tokenizer, special = tokenizers(name, kind)
    added = tokenizer.get_added_tokens_decoder()

    assert {token for token in added if grammar_tokenizer.inner.is_special_token(token)} == {*special.values()}
