"""Grammars as both ends see them: the front end checks what a worker will compile, with the same library and limits.

llguidance (MIT) is the library: it imports without torch, needs a millisecond for an ordinary schema and tens of
microseconds for a mask, and bounds its own work by fuel, so that a hostile grammar ends in an error. What it does not
bound is checked before it sees the text: size, and how deep brackets nest.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from protos.quire.plan.v1 import plan_pb2

MAX_GRAMMAR = 128 << 10
"""Longest grammar, bytes."""
MAX_DEPTH = 48
"""Deepest nesting of brackets."""

_WHITESPACE = r"[ \t\n\r]{0,12}"
"""Between the tokens of JSON: enough to indent, too little to go on for ever."""
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=100_000,
    max_grammar_size=300_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """The grammar cannot be used; one line that says why."""


class GrammarTokenizer:
    """What masks are made of: the bytes of every token, and the tokens that end a sequence."""

    def __init__(self, path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """
        Args:
            path: the model's tokenizer.json.
            vocab_size: number of logits, which may be more than there are tokens.
            eos_token_ids: the model's, at least one.

        Raises:
            GrammarError: they do not make a tokenizer.
        """
        if not eos_token_ids:
            raise GrammarError("the served model has no end-of-sequence token, which a grammar needs")
        try:
            self.inner = LLTokenizer(path.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=[*eos_token_ids])
        except Exception as error:
            raise GrammarError(f"the served model's tokenizer does not do for grammars: {_line(error)}") from None


def check_text(text: str) -> None:
    """Checks what the library does not bound.

    Raises:
        GrammarError: too long, or nested too deeply.
    """
    if len(text.encode()) > MAX_GRAMMAR:
        raise GrammarError(f"longer than {MAX_GRAMMAR} bytes")
    depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise GrammarError(f"brackets nest more than {MAX_DEPTH} deep")
        elif character in ")]}":
            depth = max(depth - 1, 0)


def compile_grammar(grammar: plan_pb2.Grammar, tokenizer: GrammarTokenizer) -> LLMatcher:
    """A matcher at the beginning of the output, whose first mask is computed already.

    Raises:
        GrammarError: see the class.
    """
    kind = grammar.WhichOneof("kind")
    text = str(getattr(grammar, kind)) if kind else ""
    check_text(text)
    try:
        source = _source(kind, text)
        matcher = LLMatcher(tokenizer.inner, source, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
    except GrammarError:
        raise
    except Exception as error:
        raise GrammarError(_line(error)) from None
    except BaseException as error:
        # A panic of the library is no Exception; anything else of that kind is not ours to stop.
        if type(error).__name__ != "PanicException":
            raise
        print(f"llguidance panicked: {_line(error)}", file=sys.stderr)
        raise GrammarError("it makes the grammar library fail") from None
    if matcher.is_error():
        raise GrammarError(_line(matcher.get_error()))
    return matcher


def lark_of_choices(choices: Sequence[str]) -> str:
    """The Lark grammar of one of several strings."""
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def lark_of_ebnf(text: str) -> str:
    """The Lark grammar of EBNF in Lark's or GBNF's notation.

    Raises:
        GrammarError: it is neither.
    """
    check_text(text)
    try:
        return str(any_to_lark(text))
    except Exception as error:
        raise GrammarError(_line(error)) from None


def _source(kind: str | None, text: str) -> str:
    match kind:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE}))
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(text))
    raise GrammarError("no form of grammar is given")


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
