"""Whitespace in JSON that a grammar forces."""

import json
from pathlib import Path

import pytest

from shared.grammars import GrammarTokenizer, compile_grammar, with_whitespace

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    """Return the bundled model's tokenizer."""
    return GrammarTokenizer(Path("shared/demo_model/tokenizer.json"), 1024, (2,))


@pytest.mark.parametrize(
    ("text", "compact", "spaced"),
    [('{"a":1}', True, True), ('{"a": 1}', False, True), ('{\n  "a": 1\n}', False, True), ('{"a":"b"}', False, False)],
)
def test_json_is_compact_unless_whitespace_is_allowed(
    tokenizer: GrammarTokenizer, text: str, compact: bool, spaced: bool
) -> None:
    """Without whitespace, only the compact text is accepted; with whitespace, indented JSON is accepted too."""
    tokens = tokenizer.inner.tokenize_str(text)

    for schema, accepted in ((SCHEMA, compact), (with_whitespace(SCHEMA), spaced)):
        matcher = compile_grammar("json_schema", schema, tokenizer)
        assert (matcher.validate_tokens(tokens) == len(tokens)) == accepted, schema


def test_a_schema_s_own_options_take_precedence(tokenizer: GrammarTokenizer) -> None:
    """The grammar library's options in the schema override both defaults."""
    schema = json.dumps(json.loads(SCHEMA) | {"x-guidance": {"whitespace_pattern": " ?"}})
    tokens = tokenizer.inner.tokenize_str('{"a": 1}')

    matcher = compile_grammar("json_schema", schema, tokenizer)

    assert matcher.validate_tokens(tokens) == len(tokens)
