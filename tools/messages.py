"""Collect every message that can reach a user into one page, docs/messages.md.

    python -m tools.messages           write the page
    python -m tools.messages --check   fail if the page is out of date

The page has three kinds of messages: those of raised errors, those of refused fields and ended requests, and log lines
of warnings and errors. They are found in the syntax tree. A message that is put together from parts appears as parts.
`{…}` stands for a value.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "messages.md"
FOLDERS = ("services", "quire", "scheduler_svc", "worker_svc", "kernels", "shared")
_LEFT_OUT = ("_pb2",)
"""The simulator's findings are for its developers; generated code has no messages of its own."""
_LEVELS = ("warning", "error", "exception", "critical")
_MESSAGE_CALLS = ("FieldViolation", "Refusal", "RefusedRequest")
_HEAD = """# Messages

Every message that can reach a user, by the folder that it comes from. `{…}` stands for a value. The page is made by
`python -m tools.messages`; a test fails when it is out of date.
"""


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """One message and its place."""

    path: str
    kind: str
    text: str


def messages(path: str, source: str) -> Iterator[Message]:
    """Find the messages of one module, in no particular order."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = _name(node.exc.func)
            if name.endswith(("Error", "Exit", "renamed")):
                yield from (Message(path, name, text) for text in _texts(node.exc))
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            if name in _LEVELS and isinstance(node.func, ast.Attribute) and node.args:
                yield from (Message(path, f"log: {name}", text) for text in _texts(node, positional_only=True))
            elif name in _MESSAGE_CALLS:
                yield from (Message(path, name, text) for text in _texts(node))
        elif isinstance(node, ast.keyword) and node.arg == "message":
            text = _rendered(node.value)
            if text:
                yield Message(path, "message", text)


def page(root: Path) -> str:
    """Return the whole page."""
    parts = [_HEAD]
    for folder in FOLDERS:
        found: set[Message] = set()
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            if not any(part in path for part in _LEFT_OUT):
                found.update(messages(path, file.read_text("utf-8")))
        rows = [
            f"| {each.path.removeprefix(folder + '/')} | {each.kind} | {_cell(each.text)} |" for each in sorted(found)
        ]
        parts.append(f"\n## {folder}\n\n| module | kind | message |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(call: ast.Call, *, positional_only: bool = False) -> Iterator[str]:
    """Find the texts among the arguments of a call: they contain a space, unlike names of fields."""
    named = [] if positional_only else [each.value for each in call.keywords]
    texts = [text for argument in [*call.args, *named] if (text := _rendered(argument))]
    joined = ": ".join(texts)
    if " " in joined:
        yield joined


def _rendered(node: ast.expr) -> str:
    """Return a text with `{name}` for each value; empty for anything but a text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"  # type: ignore[attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _rendered(node.left) + _rendered(node.right)
    if isinstance(node, ast.IfExp):
        return " / ".join(text for text in (_rendered(node.body), _rendered(node.orelse)) if text)
    return ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    text = page(ROOT)
    if "--check" in arguments:
        if PAGE.read_text("utf-8") == text:
            return 0
        print("docs/messages.md: out of date; run python -m tools.messages", file=sys.stderr)
        return 1
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
