"""Parser for one output, and the table of model families."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with these characters)

from collections.abc import Callable
from dataclasses import dataclass

from services.parsers import call_forms, families
from services.parsers.call_forms import Form
from services.parsers.calls import Calls, random_id
from services.parsers.events import Event
from services.parsers.families import Output, Read, Schemas
from services.parsers.reader import Reader


@dataclass(frozen=True, slots=True)
class Family:
    """Models that write reasoning and tool calls in the same way."""

    read: Read
    """Reads an output that may call tools."""
    read_without_tools: Read
    """Reads the output of a request without tools, in which call markers are content."""
    markers: tuple[str, ...] = ()
    """Markers that may be special tokens, which the text contains only on request."""
    think: str = ""
    """The marker that starts reasoning; a prompt may end with it."""
    end_think: str = ""
    """The marker at which reasoning ends."""
    form: Form = call_forms.hermes
    """Grammar of its tool calls."""
    calls_tools: bool = True
    """Whether the family has a form of tool calls."""
    marks_calls: bool = True
    """Whether calls begin with a marker that a grammar can distinguish from text."""


_DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
_HARMONY = tuple(f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "return", "call"))
_GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
_THINK = (families.THINK, "</think>")
_TAGS = (*_THINK, "<tool_call>", "</tool_call>")

FAMILIES: dict[str, Family] = {
    "hermes": Family(families.hermes, families.reasoning_only, _TAGS, *_THINK, call_forms.hermes),
    "qwen3_coder": Family(families.qwen3_coder, families.reasoning_only, _TAGS, *_THINK, call_forms.qwen3_coder),
    "llama3_json": Family(
        families.llama3_json, families.plain, ("<|python_tag|>",), form=call_forms.llama3_json, marks_calls=False
    ),
    "pythonic": Family(
        families.pythonic,
        families.plain,
        ("<|python_start|>", "<|python_end|>"),
        form=call_forms.pythonic,
        marks_calls=False,
    ),
    "mistral": Family(
        families.mistral,
        families.mistral_reasoning,
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        *("[THINK]", "[/THINK]"),
        call_forms.mistral,
    ),
    "deepseek": Family(families.deepseek, families.reasoning_only, (*_TAGS, *_DEEPSEEK), *_THINK, call_forms.deepseek),
    "harmony": Family(families.harmony, families.harmony, _HARMONY, form=call_forms.harmony),
    "glm4": Family(
        families.glm4,
        families.reasoning_only,
        (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        *_THINK,
        call_forms.glm4,
    ),
    "granite": Family(families.granite, families.plain, ("<|tool_call|>", "<tool_call>"), form=call_forms.granite),
    "gemma4": Family(
        families.gemma4,
        families.gemma4_reasoning,
        _GEMMA,
        *(families.GEMMA_THINK, families.GEMMA_END_THINK),
        call_forms.gemma4,
    ),
    "reasoning": Family(families.reasoning_only, families.reasoning_only, _TAGS, *_THINK, calls_tools=False),
    "plain": Family(families.plain, families.plain, calls_tools=False),
}
"""All families, by the name that `--parser` takes."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>",)),
    ("deepseek", (families.DEEPSEEK_CALL,)),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("glm4", ("<arg_key>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"name"', '"parameters"', "tools")),
    ("reasoning", ("</think>",)),
)
"""Texts that identify a family in a chat template, most specific first."""


def choose_family(chat_template: str) -> str:
    """Return the family whose markers a chat template contains; "plain" for none."""
    return next((name for name, signs in _SIGNS if all(sign in chat_template for sign in signs)), "plain")


class OutputParser:
    """Parser of one output."""

    def __init__(
        self,
        read: Read,
        *,
        schemas: Schemas | None = None,
        reasons: bool = False,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        """Start at the beginning of an output.

        Args:
            read: how the model writes.
            schemas: for each function name, the JSON schema of its arguments. Some families write all values as text,
                and the schema distinguishes strings from numbers.
            reasons: whether the prompt ends with the opening marker of reasoning.
            new_id: makes the id of a call.
        """
        self._reader = Reader()
        self._events: list[Event] = []
        output = Output(self._events.append, Calls(self._events.append, new_id), schemas or {}, reasons)
        self._steps = read(self._reader, output)

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain after `text` has arrived."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Return the events that were held back until the end of the output."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events = self._events.copy()
        self._events.clear()
        return events
