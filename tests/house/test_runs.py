"""A run of tests leaves nothing behind, also one that is terminated."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WAITS = """
import os
import signal
import sys
import tempfile

import pytest


@pytest.fixture
def service():
    with tempfile.TemporaryDirectory(prefix="service-"):
        yield


def test_waits(service, tmp_path):
    assert os.environ["XDG_STATE_HOME"].startswith(os.environ["TMPDIR"])
    print("started", file=sys.__stdout__, flush=True)
    signal.pause()
"""


def test_a_terminated_run_tears_down_its_fixtures(tmp_path: Path) -> None:
    """SIGTERM, which `timeout` and a machine that shuts down send, removes what fixtures have made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    test = tmp_path / "test_waits.py"
    test.write_text(WAITS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = (sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider", str(test))
    with subprocess.Popen(
        command, cwd=ROOT, env=environment | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("started" in line for line in lines)
        process.terminate()
        output = process.stdout.read()

    assert process.returncode == 2, output
    left = [path.name for path in folder.rglob("*") if path.is_dir()]
    assert not [name for name in left if name.startswith(("service-", "state"))], left
