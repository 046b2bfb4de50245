"""Chat templates: a model's own Jinja template turns a conversation into the text of a prompt.

The template comes with the model, so it runs in Jinja's immutable sandbox. Environment, filters and globals are those
that templates on the Hugging Face hub are written for.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template does not compile, or it refuses the conversation; the message is the template's own."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps "bos_token" and the like to their text.

        Raises:
            ChatTemplateError: the template does not compile.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt's text.

        Raises:
            ChatTemplateError: the template refuses the conversation or fails on it.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from None
        except Exception as error:  # a template may do anything Python's operators do: None + str, 1 / 0, …
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from None


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks words to train on; here it is passed through."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Returns the block's content as if the tags were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which prompts are not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)
