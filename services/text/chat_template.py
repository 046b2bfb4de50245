"""Chat templates: a model's own Jinja template renders a conversation as prompt text.

The template is untrusted input from the checkpoint, so it runs in Jinja's immutable sandbox. Templates on the Hugging
Face hub expect this environment with these filters and globals.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.text.chat import TemplateInput


class ChatTemplateError(ValueError):
    """The template does not compile or rejects the conversation; the message is the template's own."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template.

        Args:
            source: the Jinja source.
            special_tokens: maps names such as "bos_token" to their text.

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
            raise ChatTemplateError(f"chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens)

    @cached_property
    def is_strict(self) -> bool:
        """Whether the template refuses system messages after the first, or consecutive messages of one role."""
        turns = ("system", "system", "user", "user", "system", "assistant", "user")
        messages: list[dict[str, Any]] = [{"role": role, "content": "x"} for role in turns]
        conversation = TemplateInput(
            messages=messages, variables={}, add_generation_prompt=True, continue_final_message=False
        )
        try:
            self.render(conversation)
        except ChatTemplateError:
            return True
        return False

    def render(self, conversation: TemplateInput) -> str:
        """Return the text of the prompt.

        Raises:
            ChatTemplateError: the template rejects the conversation or fails on it.
        """
        fields = {
            "messages": conversation.messages,
            "tools": conversation.tools,
            "add_generation_prompt": conversation.add_generation_prompt,
        }
        context = self._template.new_context(self._special_tokens | conversation.variables | fields)
        try:
            text = "".join(self._template.root_render_func(context))
        except TemplateError as error:
            raise ChatTemplateError(str(error)) from None
        except Exception as error:  # A template may contain any Python operation, such as None + str or 1 / 0.
            raise ChatTemplateError(f"chat template failed with {type(error).__name__}") from None
        finally:
            # The template's macros refer to the context, so the conversation is part of a reference cycle that is
            # collected late.
            context.vars.clear()
        return _cut_after_last_message(text, conversation) if conversation.continue_final_message else text


def _cut_after_last_message(text: str, conversation: TemplateInput) -> str:
    """Return the text up to the end of the last message's content."""
    last = str(conversation.messages[-1]["content"]).strip()
    start = text.rfind(last)
    if start < 0:
        raise ChatTemplateError(
            "the template changes the last message, so it cannot be continued; unset continue_final_message"
        )
    return text[: start + len(last)]


class _GenerationBlock(Extension):
    """Extension that ignores `{% generation %}…{% endgeneration %}`, which marks text to train on."""

    tags = {"generation"}  # noqa: RUF012  Jinja declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the content of the block as if the tags were absent."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which is wrong for prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)
