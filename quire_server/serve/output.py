"""Forwards the children's stderr: readable log lines on a terminal, filtered by level if other output is shown."""

import contextlib
import json
import logging
from functools import cache
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from structlog.dev import ConsoleRenderer

_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}


class LogForwarder:
    """Forwards lines to one stream.

    Args:
        out: the stream.
        level: lowest level of JSON log lines to forward; other lines are always forwarded.
    """

    def __init__(self, out: TextIO, level: str = "debug") -> None:
        self._out = out
        self._level = _LEVELS[level]

    def forward(self, line: str) -> None:
        """Write one line of a child."""
        event = _parse(line)
        if event and _LEVELS.get(str(event.get("level")), logging.CRITICAL) < self._level:
            return
        text = _readable(event) if event and self._out.isatty() else line
        # The terminal may be closed, but the service continues.
        with contextlib.suppress(OSError):
            self._out.write(text + "\n")
            self._out.flush()


def _readable(event: dict[str, object]) -> str:
    return str(_console()(None, "", event))


@cache
def _console() -> "ConsoleRenderer":
    from structlog.dev import ConsoleRenderer  # The import is slow, and only terminals need it.

    return ConsoleRenderer()


def _parse(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
