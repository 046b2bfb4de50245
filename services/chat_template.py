"""Chat templates: a model's own Jinja template turns a conversation into the text of a prompt.

The template comes with the model, so it runs in Jinja's immutable sandbox. Environment, filters and globals are those
that templates on the Hugging Face hub are written for.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.chat import TemplateInput


class ChatTemplateError(ValueError):
    """The template does not compile, or it refuses the conversation; the message is the template's own."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps "bos_token" and the like to their text.

        Raises:
            ChatTemplateError: the template does not compile.
        """
        self.source = source
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

    def render(self, conversation: TemplateInput) -> str:
        """The prompt's text.

        Raises:
            ChatTemplateError: the template refuses the conversation or fails on it.
        """
        try:
            text = self._template.render(
                self._special_tokens | conversation.variables,
                messages=conversation.messages,
                tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt,
            )
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from None
        except Exception as error:  # a template may do anything Python's operators do: None + str, 1 / 0, …
            raise ChatTemplateError(f"the chat template failed: {type(error).__name__}") from None
        return _unclosed(text, conversation) if conversation.continue_final_message else text


def _unclosed(text: str, conversation: TemplateInput) -> str:
    """The text up to the end of what the last message says."""
    last = str(conversation.messages[-1]["content"]).strip()
    start = text.rfind(last)
    if start < 0:
        raise ChatTemplateError("it changes the last message, which then cannot be continued")
    return text[: start + len(last)]


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
