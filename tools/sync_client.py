"""Make quire/client.py, the blocking client, from quire/aio.py.

    python -m tools.sync_client           write the module
    python -m tools.sync_client --check   fail if the module is out of date

The two differ in `async` and `await`, in a few names, and in the module with their gRPC calls (`quire/_calls_async.py`,
`quire/_calls_sync.py`). The method is that of httpcore's `unasync.py`.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "quire" / "aio.py"
MADE = ROOT / "quire" / "client.py"
_DOCSTRING = '''"""Blocking Python client.

One `Client` is one connection; threads may share it. Do not edit this module: `python -m tools.sync_client` makes it
from `quire/aio.py`.
"""
'''
_RULES = (
    (r"\[(\w+) async for \1 in (\w+)\]", r"list(\2)"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(Client|Generation|Iterator)\b", r"\1"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\b__a(next|enter|exit)__\b", r"__\1__"),
    (r"\b_calls_async\b", "_calls_sync"),
    (r"for (\w+) in (.+):\n +yield \1\n", r"yield from \2\n"),
)


def make(source: str) -> str:
    """Return the blocking form of the asynchronous source, formatted."""
    rest = source.split('"""', 2)[2].lstrip("\n")
    for pattern, replacement in _RULES:
        rest = re.sub(pattern, replacement, rest)
    text = f"{_DOCSTRING}\n{rest}"
    for command in (["check", "--fix", "--quiet", "--select=I"], ["format", "--quiet"]):
        arguments = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={MADE}", "-"]
        text = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def main(arguments: list[str]) -> int:
    """Write the module, or compare it."""
    text = make(SOURCE.read_text("utf-8"))
    if "--check" in arguments:
        if MADE.read_text("utf-8") == text:
            return 0
        print("quire/client.py: out of date; run python -m tools.sync_client", file=sys.stderr)
        return 1
    MADE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
