"""From a model's output to typed events: reasoning, content, tool calls.

Each family of models has one incremental parser (`families`). `choose_family` finds the family from the chat template.
`make_parser` starts a parser for one output. Text goes in, in pieces of any size. Events come out as soon as they are
certain, and how the text was cut changes nothing but the cuts of the events' own texts.
"""

from services.parsers.events import CallArguments, CallBegun, Content, Event, Reasoning, merged
from services.parsers.families import forced_json
from services.parsers.parser import FAMILIES, Family, OutputParser, choose_family

__all__ = [
    "FAMILIES",
    "CallArguments",
    "CallBegun",
    "Content",
    "Event",
    "Family",
    "OutputParser",
    "Reasoning",
    "choose_family",
    "forced_json",
    "merged",
]
