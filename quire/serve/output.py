"""What children write on stderr, passed on: JSON log lines in readable form when a person is watching."""

import contextlib
import json
from typing import TextIO

import structlog

_FOR_PEOPLE = structlog.dev.ConsoleRenderer()


def forward_line(out: TextIO, line: str) -> None:
    """Writes one line of a child to `out`."""
    event = _parse(line) if out.isatty() else None
    # Whoever watched may have gone, terminal and all; the service goes on.
    with contextlib.suppress(OSError):
        out.write((str(_FOR_PEOPLE(None, "", event)) if event else line) + "\n")
        out.flush()


def _parse(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
