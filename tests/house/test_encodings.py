"""Text that people write or read is UTF-8 whatever the locale says.

The packages of scheduler and worker read what machines write: checkpoints and /proc.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("quire", "quire_server", "services", "shared")
_POSITION = {"read_text": 0, "write_text": 1, "open": 1}
"""Where a call has its encoding, or the mode that decides whether there is one."""


def without_encoding(source: str) -> Iterator[int]:
    """Yield the lines that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        builtin = isinstance(node.func, ast.Name) and node.func.id == "open"
        name = "open" if builtin else node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name not in _POSITION or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        if name == "open":
            values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "mode")]
            modes = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
            # `Path.open()` and `open(PATH)` read text. Methods named `open` on other objects have other arguments.
            if (builtin and not any("b" in mode for mode in modes)) or modes in (["r"], ["w"], ["a"], ["x"]):
                yield node.lineno
        elif len(node.args) <= _POSITION[name]:
            yield node.lineno


def test_no_package_reads_or_writes_text_in_the_encoding_of_the_locale() -> None:
    """Settings, records and reports with letters beyond ASCII are the same on every machine."""
    against = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for line in without_encoding(path.read_text("utf-8"))
    ]

    assert against == []


def test_calls_without_an_encoding_are_found() -> None:
    """Each way to read or write a text file is known."""
    wrong = ["p.read_text()", "p.write_text(t)", "open(p)", "open(p, 'w')", "p.open('a')"]
    right = ["p.read_text('utf-8')", "p.write_text(t, 'utf-8')", "open(p, 'rb')", "p.open('wb')", "watch.open(7)"]

    assert [bool(list(without_encoding(text))) for text in [*wrong, *right]] == [True] * 5 + [False] * 5
