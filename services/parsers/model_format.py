"""Format of the served model's reasoning and tool calls: its family, chat template and special tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.parsers.parser import FAMILIES, Family, choose_family


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """Format of the served model's outputs."""

    family: Family
    template: str
    """Source of the chat template; empty if there is none."""
    special_tokens: Mapping[str, int]
    """For each special-token text, the token id; grammars can match these tokens only by id."""

    @property
    def calls_tools(self) -> bool:
        """Whether the model can call tools voluntarily, which requires a chat template that renders tools."""
        return self.family.calls_tools and "tools" in self.template

    @property
    def calling_family(self) -> Family:
        """The family whose format grammars use for calls: the model's family, or a general format if it has none."""
        return self.family if self.family.calls_tools else FAMILIES["hermes"]

    def begins_in_reasoning(self, prompt_end: str) -> bool:
        """Return whether a prompt with this end contains the marker at which reasoning begins."""
        # Chat templates write a newline after the marker.
        return bool(self.family.think) and prompt_end.rstrip().endswith(self.family.think)


def model_format(parser: str, template: str, special_tokens: Mapping[str, int]) -> ModelFormat:
    """Return a model's output format. `parser` is a family name, or "auto" to use the chat template."""
    family = FAMILIES[choose_family(template) if parser == "auto" else parser]
    return ModelFormat(family, template, special_tokens)
