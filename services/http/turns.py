"""Reorders the turns of an agent's conversation so that strict chat templates accept them.

Agents send system messages between turns, and several consecutive user messages. Many templates accept only one system
message at the beginning, followed by alternating roles.
"""

from collections.abc import Iterable

from services.http.schema import Message

_SEPARATOR = "\n\n"
_SYSTEM = ("system", "developer")


def in_strict_order(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with one system message at the beginning and without consecutive user messages.

    Later system messages become user messages, so that the beginning remains unchanged for the prefix cache.
    """
    ordered: list[Message] = []
    for message in messages:
        role = message.role
        if role in _SYSTEM:
            role = "system" if all(each.role == "system" for each in ordered) else "user"
        turn = message.model_copy(update={"role": role})
        if ordered and role in ("system", "user") and ordered[-1].role == role:
            joined = _SEPARATOR.join((ordered[-1].text, turn.text))
            ordered[-1] = ordered[-1].model_copy(update={"content": joined})
        else:
            ordered.append(turn)
    return ordered
