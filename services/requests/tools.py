"""The tools of a request: which functions the model may call or must call, and how its output is read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from quire.v1 import generation_pb2 as v1
from services.parsers import (
    FAMILIES,
    Function,
    ModelFormat,
    OutputParser,
    Read,
    forced_json,
    read_functions,
    schema_of_calls,
)
from shared.errors import FieldViolation, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request."""

    shown: bool = False
    """Whether the model sees tools."""
    functions: tuple[Function, ...] = ()
    """Functions that the model may call."""
    required: tuple[Function, ...] = ()
    """Functions of which the model must call one; empty: it need not call any."""
    single: bool = False
    """Whether the model may call only once."""

    @property
    def are_forced(self) -> bool:
        """Whether a grammar makes the calls."""
        return bool(self.required)


def read_tools(request: v1.GenerateRequest, model_format: ModelFormat) -> Tools:
    """Return the tools of a request whose other fields are valid.

    Raises:
        InvalidRequestError: the tools are not usable.
    """
    if not request.HasField("chat"):
        return Tools(shown=True)  # whoever renders the prompt may show tools in it
    chat, choice = request.chat, request.chat.tool_choice
    given = json.loads(chat.tools_json) if chat.tools_json else []
    functions = read_functions(given)
    violations = [*_check_choice(request, functions)]
    if violations:
        raise InvalidRequestError(*violations)
    if choice.mode == v1.TOOL_MODE_NONE or not given:
        return Tools()
    known = tuple(each for each in functions if each is not None)
    if choice.mode == v1.TOOL_MODE_REQUIRED:
        required = tuple(each for each in known if choice.name in ("", each.name))
        return Tools(True, known, required, choice.single or bool(choice.name))
    if request.output.parse and not model_format.family.calls_tools:
        raise InvalidRequestError(
            FieldViolation(
                "chat.tools_json",
                "the served model's chat template does not support tools; set tool_choice to 'required' or to a"
                " named function",
            )
        )
    return Tools(True, known, (), choice.single)


def _check_choice(request: v1.GenerateRequest, functions: list[Function | None]) -> Iterator[FieldViolation]:
    choice = request.chat.tool_choice
    is_required = choice.mode == v1.TOOL_MODE_REQUIRED
    if choice.name and not is_required:
        yield FieldViolation("chat.tool_choice.name", "requires the mode REQUIRED; set it, or give no name")
    if choice.mode in (v1.TOOL_MODE_AUTO, v1.TOOL_MODE_REQUIRED) and not functions:
        yield FieldViolation("chat.tool_choice", "requires tools; add tools or set tool_choice to 'none'")
        return
    if not is_required:
        return
    if request.HasField("grammar"):
        yield FieldViolation("chat.tool_choice", "cannot be combined with structured output; remove one of them")
    if request.stop.min_tokens:
        yield FieldViolation("stop.min_tokens", "cannot be combined with forced calls, which decide when they end")
    if None in functions:
        form = '{"type": "function", "function": {"name": …, "parameters": …}}'
        yield FieldViolation(
            "chat.tools_json", f"tool {functions.index(None)} cannot be forced; give it the form {form}"
        )
    elif choice.name and choice.name not in [each.name for each in functions if each is not None]:
        yield FieldViolation(
            "chat.tool_choice.name", f"no tool is named {choice.name!r}; give the name of one of tools"
        )


def new_parser(
    request: v1.GenerateRequest, tools: Tools, model_format: ModelFormat, *, reasons: bool
) -> OutputParser | None:
    """Return a parser for one choice of a request; None: all output is content.

    Args:
        request: the request, or its `resume_info`.
        tools: its tools.
        model_format: the format of the served model.
        reasons: whether the output begins within reasoning.
    """
    read = _read_of(request, tools, model_format)
    if read is None:
        return None
    return OutputParser(read, schemas={each.name: each.parameters for each in tools.functions}, reasons=reasons)


def shown_tokens(request: v1.GenerateRequest, tools: Tools, model_format: ModelFormat) -> tuple[str, ...]:
    """Return the special tokens that the parser of a request reads."""
    read = _read_of(request, tools, model_format)
    return () if read in (None, forced_json) else model_format.family.markers


def _read_of(request: v1.GenerateRequest, tools: Tools, model_format: ModelFormat) -> Read | None:
    """Return how the output of a request is read; None: all of it is content."""
    if not request.output.parse or request.HasField("grammar"):
        return None  # a grammar leaves no room for markers
    if tools.are_forced:
        return forced_json
    family = model_format.family
    read = family.read if tools.shown else family.read_without_tools
    return None if read is FAMILIES["plain"].read else read


def grammar_of_calls(tools: Tools) -> v1.Grammar | None:
    """Return the grammar that makes the calls of a request; None: the model writes them freely."""
    if not tools.are_forced:
        return None
    return v1.Grammar(json_schema=json.dumps(schema_of_calls(tools.required, parallel=not tools.single)))
