"""Tests under Triton's interpreter.

Triton decides at import whether to interpret kernels. In a process with other tests it may already be imported, and
ahead-of-time compilation needs it not to interpret. The tests in folders named `interpreted` therefore get a separate
process, from a test next to the folder or from a command line that names only them.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_VARIABLE = "TRITON_INTERPRET"


def check_interpreted(tests: Path, marked: str = "not release", limit_s: int = 280) -> None:
    """Run a file's or folder's tests with these marks in the interpreter; there must be some, and all must pass."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-m", marked, str(tests)],
        cwd=ROOT,
        env=os.environ | {_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )

    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(r"\d+ passed", process.stdout), process.stdout


def left_out(config: pytest.Config) -> list[str]:
    """Return the files that pytest does not collect in a folder of interpreted tests.

    A process that interprets collects all; another process collects none.

    Raises:
        pytest.UsageError: such tests are named together with others.
    """
    if os.environ.get(_VARIABLE) == "1":
        return []
    named = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    interpreted = ["interpreted" in path.resolve().parts[len(ROOT.parts) :] for path in named]
    if all(interpreted):
        os.environ[_VARIABLE] = "1"
        return []
    if any(interpreted):
        raise pytest.UsageError("interpreted tests cannot share a process with others: name them alone")
    return ["test_*.py"]
