"""How the served model writes reasoning and tool calls: its family, with what its chat template and tokenizer add."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.parsers.parser import FAMILIES, Family, choose_family


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """Format of the served model's outputs."""

    family: Family
    template: str
    """Source of the chat template; empty without one."""
    special_tokens: Mapping[str, int]
    """Ids of the tokens that grammars match by their id only, by their text."""

    @property
    def calls_tools(self) -> bool:
        """Whether the model calls tools of its own accord; a template that does not render tools cannot show them."""
        return self.family.calls_tools and "tools" in self.template

    @property
    def calling_family(self) -> Family:
        """The family in whose form a grammar makes calls: the model's, or one of a general form if it has none."""
        return self.family if self.family.calls_tools else FAMILIES["hermes"]

    def begins_in_reasoning(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end has the marker at which reasoning begins."""
        # Templates write a newline after the marker.
        return bool(self.family.think) and prompt_end.rstrip().endswith(self.family.think)


def model_format(parser: str, template: str, special_tokens: Mapping[str, int]) -> ModelFormat:
    """Return the format of a model; `parser` is the name of its family, or "auto" to find it from the chat template."""
    family = FAMILIES[choose_family(template) if parser == "auto" else parser]
    return ModelFormat(family, template, special_tokens)
