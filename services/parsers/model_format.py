"""How the served model writes reasoning and tool calls: its family, with what its chat template and tokenizer add."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.parsers.parser import FAMILIES, Family, choose_family


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """Format of the served model's outputs."""

    family: Family
    template: str
    """Source of the chat template; empty without one."""
    special_tokens: Mapping[str, int]
    """Ids of the special tokens, by their text."""

    def begins_in_reasoning(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has the marker at which reasoning begins."""
        # Templates write a newline behind the marker.
        return bool(self.family.think) and prompt_end.rstrip().endswith(self.family.think)


def model_format(parser: str, template: str, special_tokens: Mapping[str, int]) -> ModelFormat:
    """Return the format of a model; `parser` is the name of its family, or "auto" to find it from the chat template."""
    family = FAMILIES[choose_family(template) if parser == "auto" else parser]
    # A template that does not render tools cannot show them to the model.
    family = family if "tools" in template else replace(family, calls_tools=False)
    return ModelFormat(family, template, special_tokens)
