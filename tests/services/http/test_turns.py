"""Agents' conversations, and templates that prescribe the order of roles."""

import pytest

from services.http.schema import Message
from services.http.turns import in_strict_order
from services.text.chat_template import ChatTemplate

ANY_ORDER = "{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
ONE_SYSTEM_MESSAGE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system first') }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for message in messages if message.role != 'system' %}{% if (message.role == 'user') != loop.index0 is even %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "strict"), [(ANY_ORDER, False), (ONE_SYSTEM_MESSAGE, True), (ALTERNATING, True)]
)  # fmt: skip
def test_a_template_that_prescribes_an_order_is_recognised(template: str, strict: bool) -> None:
    """It refuses what agents send."""
    assert ChatTemplate(template, {}).is_strict == strict


def test_turns_are_put_into_a_strict_order() -> None:
    """System messages at the beginning are joined, later ones are the user's, and nothing is lost or reordered."""
    turns = [
        ("developer", "a"), ("system", "b"), ("user", "c"), ("system", "d"), ("user", "e"), ("assistant", "f"),
        ("tool", "g"), ("tool", "h"), ("developer", "i"), ("assistant", "j"),
    ]  # fmt: skip

    ordered = in_strict_order([Message(role=role, content=content) for role, content in turns])

    assert [(message.role, message.content) for message in ordered] == [
        ("system", "a\n\nb"), ("user", "c\n\nd\n\ne"), ("assistant", "f"), ("tool", "g"), ("tool", "h"),
        ("user", "i"), ("assistant", "j"),
    ]  # fmt: skip
