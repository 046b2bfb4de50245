"""Tools of a request: the functions that the model may or must call, and the parser for its output."""

from collections.abc import Iterator
from dataclasses import dataclass

from quire.v1 import generation_pb2 as v1
from services.parsers import FAMILIES, Function, ModelFormat, OutputParser, Read, grammar_of_calls, read_functions
from shared.errors import FieldViolation, InvalidRequestError
from shared.json_text import read_json_text


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request."""

    shown: bool = False
    """Whether the model sees tools."""
    functions: tuple[Function, ...] = ()
    """Functions that the model may call."""
    required: bool = False
    """Whether the model must call one of them."""
    single: bool = False
    """Whether a grammar allows only one call."""
    has_grammar: bool = False
    """Whether a grammar makes the calls."""


def read_tools(request: v1.GenerateRequest, model_format: ModelFormat) -> Tools:
    """Return the tools of a request whose other fields are valid.

    Raises:
        InvalidRequestError: the tools are not usable.
    """
    if not request.HasField("chat"):
        return Tools(shown=True)  # A client that renders the prompt itself may have put tools into the prompt.
    chat, choice = request.chat, request.chat.tool_choice
    given = read_functions(read_json_text(chat.tools_json) if chat.tools_json else [])
    known = tuple(each for each in given if each is not None)
    names = {choice.name} if choice.name else set(choice.allowed)
    allowed = tuple(each for each in known if not names or each.name in names)
    has_grammar = choice.mode == v1.TOOL_MODE_REQUIRED or (
        choice.mode != v1.TOOL_MODE_NONE
        and (len(allowed) < len(known) or any(each.strict for each in allowed))
        and model_format.calls_tools
        and model_format.family.marks_calls
        and not request.HasField("grammar")
    )
    violations = [*_check_choice(request, given)]
    if has_grammar and not violations:
        violations += _check_grammar(request, given)
    if violations:
        raise InvalidRequestError(*violations)
    if choice.mode == v1.TOOL_MODE_NONE or not given:
        return Tools()
    required = choice.mode == v1.TOOL_MODE_REQUIRED
    if request.output.parse and not required and not model_format.calls_tools:
        raise InvalidRequestError(
            FieldViolation(
                "chat.tools_json",
                "the served model's chat template does not support tools; set tool_choice to 'required' or to a"
                " named function",
            )
        )
    return Tools(True, allowed, required, choice.single or bool(choice.name), has_grammar)


def _check_choice(request: v1.GenerateRequest, functions: list[Function | None]) -> Iterator[FieldViolation]:
    choice = request.chat.tool_choice
    if choice.name and choice.mode != v1.TOOL_MODE_REQUIRED:
        yield FieldViolation("chat.tool_choice.name", "requires the mode REQUIRED; set this mode, or remove the name")
    if choice.mode in (v1.TOOL_MODE_AUTO, v1.TOOL_MODE_REQUIRED) and not functions:
        yield FieldViolation("chat.tool_choice", "requires tools; add tools or set tool_choice to 'none'")
        return
    if choice.mode == v1.TOOL_MODE_NONE:
        return
    known = [each.name for each in functions if each is not None]
    named = [("chat.tool_choice.name", choice.name)] if choice.name else []
    named += [(f"chat.tool_choice.allowed[{index}]", name) for index, name in enumerate(choice.allowed)]
    for field, name in named:
        if name not in known:
            yield FieldViolation(field, f"no tool is named {name[:64]!r}; use the name of one of tools")
            return


def _check_grammar(request: v1.GenerateRequest, functions: list[Function | None]) -> Iterator[FieldViolation]:
    """Yield the errors in a request whose calls a grammar generates."""
    if request.HasField("grammar"):
        yield FieldViolation("chat.tool_choice", "cannot be combined with structured output; remove one of them")
    if request.stop.min_tokens:
        yield FieldViolation(
            "stop.min_tokens",
            "cannot be combined with forced or strict calls, whose grammar decides when the output ends",
        )
    if None in functions:
        form = '{"type": "function", "function": {"name": …, "parameters": …}}'
        yield FieldViolation(
            "chat.tools_json", f"tool {functions.index(None)} cannot be forced or constrained; give it the form {form}"
        )


def new_parser(
    request: v1.GenerateRequest, tools: Tools, model_format: ModelFormat, *, reasons: bool
) -> OutputParser | None:
    """Return a parser for one choice; None if the whole output is content.

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
    if _read_of(request, tools, model_format) is None:
        return ()
    return (model_format.calling_family if tools.required else model_format.family).markers


def _read_of(request: v1.GenerateRequest, tools: Tools, model_format: ModelFormat) -> Read | None:
    """Return the parser function for a request's output; None if the whole output is content."""
    if not request.output.parse or request.HasField("grammar"):
        return None  # An output that is constrained by the client's grammar contains no markers.
    if tools.required:
        return model_format.calling_family.read
    family = model_format.family
    read = family.read if tools.shown else family.read_without_tools
    return None if read is FAMILIES["plain"].read else read


def make_grammar(tools: Tools, model_format: ModelFormat, *, reasons: bool) -> v1.Grammar | None:
    """Return the grammar for a request's calls; None if calls are not constrained.

    Args:
        tools: the tools of the request.
        model_format: the format of the served model.
        reasons: whether the output begins within reasoning.
    """
    if not tools.has_grammar:
        return None
    text = grammar_of_calls(
        model_format, tools.functions, required=tools.required, single=tools.single, reasons=reasons
    )
    return v1.Grammar(ebnf=text)
