"""Scripts do nothing on import: no tool and no test starts anything before it is run."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "checks",
    "measure",
    "records",
    "tools",
    "quire",
    "quire_server",
    "services",
    "scheduler_svc",
    "worker_svc",
    "kernels",
    "shared",
)
STARTS = {"main", "run", "parse_args", "exit"}


def starts(source: str) -> list[str]:
    """The calls at module level, outside of `if __name__ == ...`, that begin what a script is for."""
    statements = [each for each in ast.parse(source).body if isinstance(each, ast.Expr | ast.Assign)]
    calls = [node.func for each in statements for node in ast.walk(each) if isinstance(node, ast.Call)]
    names = [func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in calls]
    return [name for name in names if name in STARTS]


def test_no_module_starts_anything_when_it_is_imported() -> None:
    """Neither reads a command line nor runs."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]

    assert len(paths) > 300
    assert {str(path): found for path in paths if (found := starts(path.read_text()))} == {}


@pytest.mark.parametrize("line", ["main()", "options = parser.parse_args()", "found = asyncio.run(f())"])
def test_the_rule_bites(line: str) -> None:
    """Such a line is found at module level, and allowed where it is guarded."""
    assert starts(line)
    assert not starts(f'if __name__ == "__main__":\n    {line}')
