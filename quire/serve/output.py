"""What children write on stderr, passed on: JSON log lines in readable form when a person is watching, and only those
from a certain level on where something else is to be seen."""

import contextlib
import json
import logging
from typing import TextIO

import structlog

_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}
_FOR_PEOPLE = structlog.dev.ConsoleRenderer()


class LogForwarder:
    """Passes lines on to one stream.

    Args:
        out: where they go.
        level: JSON log lines below this level are left out; what is no log line is always passed on.
    """

    def __init__(self, out: TextIO, level: str = "debug") -> None:
        self._out = out
        self._level = _LEVELS[level]

    def forward(self, line: str) -> None:
        """Writes one line of a child."""
        event = _parse(line)
        if event and _LEVELS.get(str(event.get("level")), logging.CRITICAL) < self._level:
            return
        text = str(_FOR_PEOPLE(None, "", event)) if event and self._out.isatty() else line
        # Whoever watched may have gone, terminal and all; the service goes on.
        with contextlib.suppress(OSError):
            self._out.write(text + "\n")
            self._out.flush()


def _parse(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
