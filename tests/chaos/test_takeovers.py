"""Machines with a scheduler each are lost, stopped and cut off: clients of resumable requests only see pauses."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checks.chaos.takeovers import Fault
from measure.testbed.service import ROOT


def _has_namespaces() -> bool:
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, ("etcd", "ip", "unshare"))) or not _has_namespaces(),
    reason="network namespaces need root and iproute2, and the lease needs etcd",
)


@pytest.mark.every(3)
def test_faults_of_every_kind_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """After each takeover, every stream continues with the reference's tokens; each fault changes the leader."""
    results = tmp_path / "results.json"
    command = [
        *(sys.executable, "-m", "checks.chaos.takeovers", "--streams=12", "--max-tokens=150", f"--json={results}"),
        *("--minutes=1.2", "--interval-s=14"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)

    assert done.returncode == 0, done.stderr[-20000:]
    figures = json.loads(results.read_text())
    print(figures)
    assert figures["failed"] == 0
    assert figures["takeovers"] >= figures["faults"] >= len(Fault)
    assert figures["tokens_compared"] >= figures["tokens"] > 0  # A stream with a schema also has its end.
