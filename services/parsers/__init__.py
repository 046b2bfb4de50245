"""Parsers that turn a model's output into typed events: reasoning, content, tool calls.

Each model family has one incremental parser (`families`). `choose_family` determines the family from the chat template.
An `OutputParser` reads one output in pieces of any size and returns events as soon as they are certain. The piece sizes
only affect where texts are divided into events.

If calls must follow their schemas, `grammar_of_calls` writes a grammar in the family's format (`call_forms`). The same
parser reads the constrained output.
"""

from services.parsers.call_grammar import grammar_of_calls
from services.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning, merged
from services.parsers.families import Read
from services.parsers.functions import Function, read_functions
from services.parsers.model_format import ModelFormat, model_format
from services.parsers.parser import FAMILIES, Family, OutputParser, choose_family

__all__ = [
    "FAMILIES",
    "CallArguments",
    "CallBegun",
    "CallEnded",
    "Content",
    "Event",
    "Family",
    "Function",
    "ModelFormat",
    "OutputParser",
    "Read",
    "Reasoning",
    "choose_family",
    "grammar_of_calls",
    "merged",
    "model_format",
    "read_functions",
]
