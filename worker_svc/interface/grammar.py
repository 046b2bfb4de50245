"""Grammars: their text, the scheduler's request for compilation, and the worker's report."""

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar of a row's output."""

    key: bytes
    """SHA-256 of the grammar; grammars with equal keys are equal."""
    kind: str
    """"json_schema", "regex" or "lark"; empty if the scheduler sent no usable grammar."""
    text: str
    costly: bool
    """Whether the front end measured a long compile time. Other grammars are then compiled first."""


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """Request to compile a grammar; the reply is a `GrammarReport`."""

    grammar: Grammar
    drop: tuple[bytes, ...] = ()
    """Keys of compiled grammars to drop."""


class GrammarFailureCause(enum.Enum):
    """Cause of a failure to compile a grammar."""

    GRAMMAR = enum.auto()
    """The grammar is invalid or too expensive on any worker."""
    WORKER = enum.auto()
    """Another worker may be able to compile the grammar."""


@dataclass(frozen=True, slots=True)
class GrammarReport:
    """Result of compiling a grammar."""

    key: bytes
    failure: str = ""
    """One line; empty if the grammar is ready."""
    cause: GrammarFailureCause | None = None
    """None if the grammar is ready."""
