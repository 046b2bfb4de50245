"""Finds in the stderr of a child process why the process ended.

A failing command prints one line with its name, which is the reason. For an uncaught exception, the interpreter prints
the exception at the end of a traceback. More lines may follow, because libraries report leaks while the interpreter
shuts down. A log line after a traceback shows that the process continued. If the last line is a log line, its text and
error are the reason, because the reason is logged as JSON again.
"""

import json

_TRACEBACK = "Traceback (most recent call last):"


class LastWords:
    """Reads the stderr of one child, line by line.

    Args:
        command: what the error line of the child's command begins with, such as "quire worker: ".
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._error = ""
        self._exception = ""
        self._last_line = ""
        self._in_traceback = False

    @property
    def reason(self) -> str:
        """The command's error, else the exception that ended the process, else the last line; empty without output."""
        return self._error or self._exception or _text(self._last_line)

    def add(self, line: str) -> bool:
        """Read a non-blank line; return whether it is the command's error."""
        self._last_line = line
        if line.startswith(self._command):
            self._error = line.removeprefix(self._command)
            return True
        if line.startswith(_TRACEBACK):
            self._in_traceback = True
        elif line.startswith("{"):
            self._in_traceback, self._exception = False, ""
        elif self._in_traceback and not line[0].isspace():
            self._in_traceback, self._exception = False, line
        return False


def _text(line: str) -> str:
    """Return a line as text; a log line as its event, with the reason or error if it has one."""
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "event" not in found:
        return line
    return ": ".join(str(found[key]) for key in ("event", "reason", "error") if found.get(key))
