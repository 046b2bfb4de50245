"""Puts the turns of an agent's conversation into an order that strict chat templates accept.

Agents send several system messages, also between the turns, and several messages of a user in a row. Many templates
take only one system message, at the beginning, and then alternating roles.
"""

from collections.abc import Iterable

from services.http.schema import Message

_SEPARATOR = "\n\n"
_SYSTEM = ("system", "developer")


def in_strict_order(messages: Iterable[Message]) -> list[Message]:
    """Return the messages with one system message at the beginning and without two of the user in a row.

    Later system messages become messages of the user, so that the beginning stays the same for the prefix cache.
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
