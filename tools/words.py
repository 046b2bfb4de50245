"""Check docstrings, comments and documentation for words that a reader has to read twice: `python -m tools.words`.

Each pattern has a replacement. A line that needs the word contains `words: right`, in a comment behind it. Code in
backticks is not checked.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "checks", "kernels", "measure", "quire", "quire_server", "records", "scheduler_svc", "services", "shared", "tools",
    "worker_svc",
)  # fmt: skip
PAGES = ("README.md", "SECURITY.md", "docs/*.md", "deploy/**/*.md")
_GENERATED = ("docs/clients.md", "docs/metrics.md", "docs/replay.md", "docs/strategies.md")
WORDS = {
    r"(?<!-)\bbeside\b(?!:)": "next to, in addition to, concurrently with, or compared with",
    r"\b(nobody|whoever|Whoever)\b": "the role (client, operator), or the passive",
    r"\bunread\b": "opaque, pending, or without decoding",
    r"\bconnects? again\b": "reconnect",
    r"\bPoisson process\b": "Poisson arrivals",
    r"\b(forgets?|forgotten)\b": "drop",
    r"(?<!`)\bfigures\b(?!`)": "numbers, metrics or results",
    r"\blets? go\b|\bgives? way\b": "release, or preempt",
    r"\btold\b": "notify",
    r"\blittle of the processor\b": "little CPU time",
    r"(?<![Ee]ndpoint )(?<![-/])\bpickers?\b(?![-.])": "endpoint picker",
    r"\bto the last bit\b": "bitwise identical",
    r"\b(equal|common) beginnings?\b": "shared prefix",
    r"\bgives? up\b|\bgave up\b|\bgiven up\b": "declare lost, abandon, or stop retrying",
    r"(?<!-)\bworlds?\b(?![-:]| size)": "simulation",
    r"\bas differences\b|\bdifferences from (the|earlier)\b": "deltas",
    r"\bin place of\b|\btakes? (the|its|their) place\b": "instead of, or replace",
    r"\bgoes on\b|\bgo on\b|\bcarr(y|ies) on\b": "continue",
    r"^\s*(\"\"\")?(What|Who|Whoever) (a|an|the|one|each|every|all) [\w ]+\.$": "a noun as the subject",
}
"""Pattern, and what to write instead."""


def findings(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield one line for each word that a file should not have, with its path below `root`."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    for number, prose in _prose(text) if path.suffix == ".py" else enumerate(lines, 1):
        for pattern, instead in WORDS.items():
            found = re.search(pattern, re.sub(r"`[^`]*`|\]\([^)]*\)", "", prose))
            if found and "words: right" not in lines[number - 1]:
                yield f"{path.relative_to(root)}:{number}: {found[0].strip()!r}: write {instead}"


def _prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and comments with their numbers."""
    docstrings = {
        (statement.lineno, statement.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(body := getattr(node, "body", None), list)
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.start in docstrings):
            yield from enumerate(token.string.splitlines(), token.start[0])


def main() -> int:
    """Print the findings; return 1 if there are any."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "_pb2" not in path.name]
    pages = {path for pattern in PAGES for path in ROOT.glob(pattern)} - {ROOT / name for name in _GENERATED}
    found = [line for path in [*sorted(paths), *sorted(pages)] for line in findings(path)]
    print("\n".join(found) or "words: none to replace")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
