"""Compiles grammars with the same library and limits in front ends and workers.

The library is llguidance (MIT), which does not import torch. Compiling an ordinary schema takes milliseconds, and a
mask takes tens of microseconds. Three limits bound a grammar's cost:

* `check_text` rejects, without compiling, a grammar that is too large or requires too many repetitions.
* The library's own limits bound lexer and parser, during compilation and in each step.
* Because some short grammars still run for minutes or overflow the library's stack, the front end compiles each grammar
  on trial in a separate process (`services.grammars.trial_compiler`) before it is sent to a worker.

The library can tokenise forced text like the tokenizer. This option is not used, because its cost per step grows with
the length of the text, which is not limited.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from shared.json_text import describe_json_error

MAX_GRAMMAR = 128 << 10
"""Maximum size of a grammar, bytes."""
MAX_DEPTH = 48
"""Maximum nesting depth of brackets."""
MAX_REPEATS = 100_000
"""Maximum number of repetitions that a grammar may require (a minimum). Upper bounds of repetitions cost nothing."""
MAX_STRINGS = 2000
"""Maximum number of values in an enum, or of strings in a choice."""

_WHITESPACE = r"[ \t\n\r]{0,12}"
"""Allowed whitespace between JSON tokens: enough for indentation, but bounded so that the output ends."""
_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
_TOO_MUCH = re.compile(r"too (big|large|many)|fuel|; max is|Unable to determine")
"""Matches the library's messages about its limits."""
_MINIMA = ("minItems", "minLength", "minProperties")
_BRACKET = re.compile(r"[(\[{)\]}]")
_REPETITION = re.compile(
    r"""
      \\[pPxuU]\{[^}]*\} | \\.              # an escape, whose braces repeat nothing
    | \[\^?\]? (?: \\. | [^]\\] )* \]       # a class
    | [()]
    | \{ (?P<braces>\d+) (?:,\d*)? \}       # a minimum count
    | ~ \s* (?P<tilde>\d+)                  # the same in Lark
    """,
    re.VERBOSE | re.DOTALL,
)


def _limits(step_max_items: int) -> LLParserLimits:
    return LLParserLimits(
        # 300 schemas for AWS resources, with up to 57 kB each, need at most a third of these two limits.
        max_grammar_size=10_000,
        initial_lexer_fuel=300_000,
        # An object with 245 optional properties reaches this limit in its largest parser row.
        max_items_in_row=1000,
        step_max_items=step_max_items,
        # Each item takes about 200 ns. With 100,000 tokens, an enum of 2,000 strings needs half of this limit in its
        # first step.
        step_lexer_fuel=150_000,
        # Each state takes about 1 kB, shared by all requests with the grammar.
        max_lexer_states=50_000,
        verbose_errors=False,
    )


_SCHEMA_LIMITS = _limits(step_max_items=30_000)
_OTHER_LIMITS = _limits(step_max_items=10_000)
"""Limits of other grammars. Lark rules may be ambiguous, which makes each item ten times as expensive, up to 30 ms per
step.
"""


class GrammarError(ValueError):
    """The grammar is not usable; the message is one line with the reason and the remedy."""


class GrammarsUnsupportedError(GrammarError):
    """The served model does not support grammars."""


class GrammarTokenizer:
    """Token data for computing masks: the bytes of every token, and the end-of-sequence tokens."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Read the tokenizer, which holds the GIL for about 7 µs per vocabulary token.

        Args:
            path: the model's tokenizer.json.
            vocab_size: number of logits, which may exceed the number of tokens.
            eos_token_ids: the model's end-of-sequence tokens, at least one.

        Raises:
            GrammarsUnsupportedError: the file or the tokens are not suitable.
        """
        if not eos_token_ids:
            raise GrammarsUnsupportedError(
                "not supported: the served model has no end-of-sequence token; leave grammar unset"
            )
        try:
            self.inner = LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=[*eos_token_ids])
        except Exception as error:
            raise GrammarsUnsupportedError(
                f"not supported by the served model's tokenizer: {_one_line(error)}"
            ) from None


def is_special(text: str, *, special: bool) -> bool:
    """Return whether grammars match an added token only by its id, which holds for special tokens and "<…>"."""
    return special or (text.startswith("<") and text.endswith(">"))


def check_text(text: str) -> None:
    """Check the properties that the library does not bound.

    Raises:
        GrammarError: the text is too long or nested too deeply.
    """
    if len(text.encode()) > MAX_GRAMMAR:
        raise GrammarError(f"too long; use at most {MAX_GRAMMAR} bytes")
    depth = 0
    for found in _BRACKET.finditer(text):
        depth = depth + 1 if found[0] in "([{" else max(depth - 1, 0)
        if depth > MAX_DEPTH:
            raise GrammarError(f"brackets nest too deeply; nest at most {MAX_DEPTH} levels")


def compile_grammar(kind: str, text: str, tokenizer: GrammarTokenizer) -> LLMatcher:
    """Return a matcher at the start of the output, with its first mask already computed.

    Args:
        kind: "json_schema", "regex" or "lark", as in plan.proto.
        text: the grammar.
        tokenizer: the served model's tokenizer.

    Raises:
        GrammarError: see the class.
    """
    check_text(text)
    limits = _SCHEMA_LIMITS if kind == "json_schema" else _OTHER_LIMITS
    try:
        matcher = LLMatcher(tokenizer.inner, _source(kind, text), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except GrammarError:
        raise
    except Exception as error:
        raise GrammarError(_one_line(error)) from None
    except BaseException as error:
        # A panic of the library is not an Exception. Re-raise any other BaseException.
        if type(error).__name__ != "PanicException":
            raise
        print(f"llguidance panicked: {_one_line(error)}", file=sys.stderr)
        raise GrammarError("not supported by the grammar library; simplify it") from None
    check_matcher(matcher)
    return matcher


def check_matcher(matcher: LLMatcher) -> None:
    """Check that a matcher has not failed.

    Raises:
        GrammarError: the matcher has failed; the message contains the library's reason.
    """
    if matcher.is_error():
        reason = _one_line(matcher.get_error())
        # For some errors, such as a rule that refers to itself, the library reports only an internal name.
        if " " not in reason:
            raise GrammarError(f"cannot be compiled ({reason}); check its references and simplify it")
        raise GrammarError(f"too complex: {reason}; simplify it" if _TOO_MUCH.search(reason) else reason)


def with_whitespace(schema: str) -> str:
    """Return a JSON schema that allows whitespace between the tokens of the output.

    Raises:
        GrammarError: the text is not a JSON object.
    """
    parsed = _parsed_schema(schema)
    options = parsed.get("x-guidance")
    parsed["x-guidance"] = {"whitespace_pattern": _WHITESPACE} | (options if isinstance(options, dict) else {})
    return json.dumps(parsed)


def lark_of_choices(choices: Sequence[str]) -> str:
    """Return a Lark grammar that accepts exactly one of several strings."""
    # Use a single terminal, because each alternative of a rule would need its own parser item.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def lark_of_ebnf(text: str) -> str:
    """Return the Lark grammar for EBNF in Lark's or GBNF's notation.

    Raises:
        GrammarError: the text is neither.
    """
    check_text(text)
    try:
        return str(any_to_lark(text))
    except Exception as error:
        raise GrammarError(_one_line(error)) from None


def _source(kind: str, text: str) -> str:
    """Return the library's input; reject a grammar that requires too many repetitions."""
    match kind:
        case "json_schema":
            schema = _checked_schema(text)
            options = schema.get("x-guidance")
            schema["x-guidance"] = {"whitespace_pattern": ""} | (options if isinstance(options, dict) else {})
            parts = [{"lark_grammar": f"start: @schema{_OPTIONS}"}, {"name": "schema", "json_schema": schema}]
        case "regex":
            _check_repetitions(text)
            parts = [{"lark_grammar": f"start: /{regex_to_lark(text, '')}/{_OPTIONS}"}]
        case "lark":
            _check_repetitions(text)
            parts = [{"lark_grammar": text + _OPTIONS}]
        case _:
            raise GrammarError("missing; add one form of grammar")
    return json.dumps({"grammars": parts})


def _parsed_schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise GrammarError(describe_json_error(error)) from None
    if not isinstance(schema, dict):
        raise GrammarError("must be a JSON object; use a schema as an object")
    return schema


def _checked_schema(text: str) -> dict[str, Any]:
    schema = _parsed_schema(text)
    for part in _parts(schema):
        for key in _MINIMA:
            minimum = part.get(key)
            if isinstance(minimum, int) and minimum > MAX_REPEATS:
                raise GrammarError(f"{key} is too large ({minimum}); use at most {MAX_REPEATS}")
        values = part.get("enum")
        if isinstance(values, list) and len(values) > MAX_STRINGS:
            raise GrammarError(f"an enum has too many values ({len(values)}); use at most {MAX_STRINGS}")
        properties = part.get("patternProperties")
        for pattern in (part.get("pattern"), *(properties if isinstance(properties, dict) else ())):
            if isinstance(pattern, str):
                _check_repetitions(pattern)
    return schema


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Iterate over all objects in a JSON value."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _check_repetitions(text: str) -> None:
    """Reject a regular expression or Lark grammar that requires more than MAX_REPEATS repetitions.

    The counts of nested groups multiply. A string in a Lark grammar that looks like a count is treated as a count.
    """
    most = [1]
    """Required repetitions within each open group; the first entry is for text outside of all groups."""
    closed, within = -1, 1
    """End position of the last group, and the repetitions required within it."""
    for found in _REPETITION.finditer(text):
        count = found["braces"] or found["tilde"]
        if count:
            follows_group = closed >= 0 and not text[closed : found.start()].strip()
            num_repeats = int(count[:20]) * (within if follows_group else 1)
            if num_repeats > MAX_REPEATS:
                raise GrammarError(f"requires too many repetitions ({num_repeats}); use at most {MAX_REPEATS}")
            most[-1] = max(most[-1], num_repeats)
        elif found[0] == "(":
            most.append(1)
        elif found[0] == ")" and len(most) > 1:
            closed, within = found.end(), most.pop()
            most[-1] = max(most[-1], within)


def _one_line(error: object) -> str:
    # Remove the quoted grammar from the library's message, because the quote includes lines added here.
    text = re.split(r"\n *\d+ \| ", str(error))[0].removesuffix("<non-verbose/>")
    return " ".join(text.split())[:300] or type(error).__name__
