"""Parser of one output, and the choice of its family."""

from collections.abc import Callable

from services.parsers import families
from services.parsers.calls import Calls, random_id
from services.parsers.events import Event
from services.parsers.families import Family, Output, Schemas
from services.parsers.reader import Reader

FAMILIES: dict[str, Family] = {
    "hermes": families.hermes,
    "qwen3_coder": families.qwen3_coder,
    "llama3_json": families.llama3_json,
    "pythonic": families.pythonic,
    "mistral": families.mistral,
    "deepseek": families.deepseek,
    "harmony": families.harmony,
    "glm4": families.glm4,
    "granite": families.granite,
    "reasoning": families.reasoning_only,
    "plain": families.plain,
}
"""All families, by the name that `--parser` takes."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>",)),
    ("deepseek", (families.DEEPSEEK_CALL,)),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("glm4", ("<arg_key>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ('"name"', '"parameters"', "tools")),
    ("reasoning", ("</think>",)),
)
"""What a chat template of a family contains, most specific first."""


def choose_family(chat_template: str) -> str:
    """Return the name of the family whose markers a chat template contains; "plain" for none."""
    return next((name for name, signs in _SIGNS if all(sign in chat_template for sign in signs)), "plain")


class OutputParser:
    """Parser of one output."""

    def __init__(
        self,
        family: Family,
        *,
        schemas: Schemas | None = None,
        reasons: bool = False,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        """Start at the beginning of an output.

        Args:
            family: how the model writes.
            schemas: JSON schemas of the arguments of the functions, by name; some families give values as text, and
                the schema tells a string from a number.
            reasons: whether the prompt ends with the opening marker of reasoning.
            new_id: makes the id of a call.
        """
        self._reader = Reader()
        self._events: list[Event] = []
        output = Output(self._events.append, Calls(self._events.append, new_id), schemas or {}, reasons)
        self._steps = family(self._reader, output)

    def push(self, text: str) -> list[Event]:
        """Return the events that are certain after `text` has arrived."""
        self._reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Return the events that were held back, at the end of the output."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events = self._events.copy()
        self._events.clear()
        return events
