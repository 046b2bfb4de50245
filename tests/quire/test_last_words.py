"""Why a child process ended, from what it wrote to stderr."""

import pytest

from quire_server.serve.last_words import LastWords


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["quire worker: device: not found; use cpu", "leaked semaphores"], "device: not found; use cpu"),
        (["Traceback (most recent call last):", "  File x", "ValueError: wrong", "leaked"], "ValueError: wrong"),
        (["loading", "Killed"], "Killed"),
        (['{"event": "step failed", "error": "no memory", "level": "error"}'], "step failed: no memory"),
        (['{"event": "worker ready", "level": "info"}'], "worker ready"),
        (['{"step": 1}'], '{"step": 1}'),
        (["{not JSON"], "{not JSON"),
        ([], ""),
    ],
)
def test_the_reason_is_one_readable_line(lines: list[str], expected: str) -> None:
    """The command's error comes first, then an exception, then the last line. A log line is reduced to its text."""
    words = LastWords("quire worker: ")
    for line in lines:
        words.add(line)

    assert words.reason == expected
