"""Grammars for tool calls in the format of the served model's family.

The grammar allows only outputs whose calls the family's parser can read. The arguments of these calls follow their
schemas.
"""

from collections.abc import Sequence

from services.parsers.functions import Function
from services.parsers.grammar_writer import GrammarWriter
from services.parsers.model_format import ModelFormat

_SPACE = "/[ \\n]{0,4}/"
"""Whitespace between the reasoning and the first call."""


def grammar_of_calls(
    model_format: ModelFormat, functions: Sequence[Function], *, required: bool, single: bool, reasons: bool
) -> str:
    """Return the grammar of an output that calls functions, in Lark's notation.

    Args:
        model_format: the format of the served model.
        functions: the functions.
        required: whether the output must consist of calls. Otherwise it is text that may contain calls, which requires
            a family with a start marker.
        single: whether there is at most one call.
        reasons: whether the output begins within reasoning.
    """
    family = model_format.calling_family
    writer = GrammarWriter(model_format.template, model_format.special_tokens, family.think, required, single)
    before = ""
    if family.think and (reasons or not required or family.think in model_format.template):
        rest = f"{writer.until(family.end_think)} {_SPACE}"
        before = rest if reasons else f"({writer.text(family.think)} {rest})?"
    return writer.grammar(f"{before} {family.form(writer, functions)}")
