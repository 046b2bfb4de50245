"""Writer of grammars in Lark's notation for llguidance: markers, texts between them, JSON, and calls."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from services.parsers.call_schema import closed
from services.parsers.functions import Function

_LIKE_TEMPLATES = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON format in which chat templates write earlier calls."""
_SCALARS = ("string", "integer", "number", "boolean", "null")
"""Types of JSON values without separators."""


@dataclass(slots=True)
class GrammarWriter:
    """Writes one grammar. Its methods return expressions and collect the rules for them."""

    template: str
    """Source of the chat template."""
    special_tokens: Mapping[str, int]
    """For each special-token text, the token id; grammars can match these tokens only by id."""
    think: str
    """The marker at which reasoning begins; empty if the family has none."""
    required: bool
    """Whether the output must consist of calls; otherwise it is text that may contain calls."""
    single: bool
    """Whether there is at most one call."""
    rules: dict[str, str] = field(default_factory=dict)
    """For each rule text, the rule's name."""

    def grammar(self, start: str) -> str:
        """Return the grammar whose outputs match an expression."""
        return "\n".join(("%llguidance {}", f"start: {start}", *(f"{name}{rule}" for rule, name in self.rules.items())))

    def text(self, *parts: str) -> str:
        """Return an expression for consecutive texts. A text that is a special token is matched as this token."""
        return " ".join(
            " ".join(f"<[{self.special_tokens[part]}]>" for part in group) if special else json.dumps("".join(group))
            for special, group in groupby(filter(None, parts), self.special_tokens.__contains__)
        )

    def until(self, end: str, *others: str) -> str:
        """Return an expression for text up to and including its end marker, without any of the other texts."""
        if end in self.special_tokens:
            return f"{self.without(end, *others)} {self.text(end)}"
        return self._named(f"[lazy]: {self._text_without(others, _pattern(end))}")

    def without(self, *texts: str) -> str:
        """Return an expression for text that contains none of `texts`, not even a special token spelt as characters."""
        return self._text_without(texts)

    def _text_without(self, texts: tuple[str, ...], end: str = "") -> str:
        if not texts:
            return f"/(?s:.*){end}/"
        anywhere = "|".join(map(_pattern, texts))
        return self._named(f": /(?s:.*){end}/ & ~/(?s:.*)({anywhere})(?s:.*)/", letter="T")

    def any_of(self, expressions: Iterable[str]) -> str:
        """Return an expression that matches one of several expressions."""
        return self._named(f": {' | '.join(expressions)}")

    def json(self, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
        """Return an expression for a JSON value, whose schema may refer to definitions."""
        whole = closed(schema)
        if "$ref" in json.dumps(whole):
            whole = closed(definitions) | whole
        if whole.get("type") not in _SCALARS:
            whole["x-guidance"] = _LIKE_TEMPLATES
        return self._named(f": %json {json.dumps(whole)}")

    def arguments(self, function: Function) -> str:
        """Return an expression for the arguments of a function as a JSON object, which is empty without a schema."""
        schema = dict(function.parameters) or {"properties": {}}
        return self.json({"type": "object"} | schema, {})

    def object_call(self, function: Function, key: str, *, begin: str = "", end: tuple[str, ...] = ()) -> str:
        """Return an expression for a call as a JSON object between texts, with the arguments at a key."""
        opening = f'{begin}{{"name": "{function.name}", "{key}": '
        return f"{self.text(opening)} {self.arguments(function)} {self.text('}', *end)}"

    def calls(self, marker: str, call: str, separator: str | None, *others: str) -> str:
        """Return an expression for an output that consists of calls, or of text with calls.

        Args:
            marker: the text that starts each call; empty if the whole output consists of calls.
            call: an expression for a call after its marker.
            separator: the text between two calls; None if only one call is allowed.
            others: further markers that begin calls for the reader, so that they must not be in the text.
        """
        several = separator is not None and not self.single
        if not self.required:
            others = (*filter(None, (self.think,)), *others)
            before, after = self.until(marker, *others), self.without(marker, *others)
            return f"({before} {call}){'*' if several else '?'} {after}"
        begin = self.text(marker)
        more = f"({self.text(separator or '')} {begin} {call})*" if several else ""
        return f"{begin} {call} {more}"

    def list_of(self, call: str) -> str:
        """Return an expression for a list of calls in brackets."""
        more = "" if self.single else f"({self.text(', ')} {call})*"
        return f"{self.text('[')} {call} {more} {self.text(']')}"

    def _named(self, rule: str, letter: str = "r") -> str:
        """Return the name of a rule, and add the rule if it is new."""
        return self.rules.setdefault(rule, f"{letter}{len(self.rules)}")


def _pattern(text: str) -> str:
    """Return a regular expression for a text, within slashes."""
    return re.escape(text).replace("/", "\\/")
