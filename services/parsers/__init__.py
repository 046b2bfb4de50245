"""From a model's output to typed events: reasoning, content, tool calls.

Each family of models has one incremental parser (`families`). `choose_family` finds the family from the chat template.
An `OutputParser` reads one output. It takes text in pieces of any size. It returns events as soon as
they are certain. The sizes of the pieces affect only where the texts of events are cut.
"""

from services.parsers.call_schema import schema_of_calls
from services.parsers.events import CallArguments, CallBegun, CallEnded, Content, Event, Reasoning, merged
from services.parsers.families import Read, forced_json
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
    "forced_json",
    "merged",
    "model_format",
    "read_functions",
    "schema_of_calls",
]
