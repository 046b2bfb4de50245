"""Tests under Triton's interpreter.

Triton decides when it is imported whether to interpret, and in this process it may have been imported already
by anything; compiling ahead of time needs it not to. So these tests get a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check_interpreted(tests: Path, **environment: str) -> None:
    """Runs a file or folder of tests, interpreted, on one thread; all must pass, and there must be some."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", str(tests)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(r"\d+ passed", process.stdout), process.stdout
