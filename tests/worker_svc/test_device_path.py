"""The path of a GPU from plan to tokens, with everything but the GPU: see `tests/worker_svc/interpreted`.

Triton decides when it is imported whether to interpret, so this takes a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytest.importorskip("triton", reason="the kernels need triton to be interpreted")


def test_the_device_path_computes_and_never_waits() -> None:
    """Interpreted kernels under the engine of a GPU give the oracle's tokens, and no step reads a value back."""
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "tests/worker_svc/interpreted"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "QUIRE_CPU_KERNELS": "off"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert process.returncode == 0, process.stdout[-6000:] + process.stderr[-2000:]
    assert re.search(r"\d+ passed", process.stdout), process.stdout
