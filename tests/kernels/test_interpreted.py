"""Runs the tests of `tests/kernels/interpreted` under Triton's interpreter.

Triton decides when it is imported whether to interpret, and in this process it may have been imported already
by anything; compiling ahead of time needs it not to. So each file gets a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))

pytest.importorskip("triton", reason="the kernels need triton to be interpreted")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_equal_their_references(file: Path) -> None:
    """Every Triton kernel, interpreted, equals its reference."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", str(file)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(r"\d+ passed", process.stdout), process.stdout
