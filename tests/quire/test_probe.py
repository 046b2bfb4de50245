"""A process's pulse, and the container probe that reads it."""

import os
import time
from pathlib import Path

import pytest

from quire_server.probe import main
from shared.pulse import ENVIRONMENT, Pulse


def test_the_probe_fails_until_the_first_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loading process has no pulse; a running process has one; a process with an old pulse hangs."""
    file = tmp_path / "pulse"
    monkeypatch.setenv(ENVIRONMENT, str(file))
    pulse = Pulse()
    monkeypatch.setenv(ENVIRONMENT, str(file))
    before = main(["60"])
    pulse.beat()
    alive = main(["60"])
    old = time.time() - 61
    os.utime(file, (old, old))

    assert (before, alive, main(["60"])) == (1, 0, 1)


def test_other_ranks_of_a_group_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 has a main loop with a pulse."""
    monkeypatch.setenv("RANK", "1")

    assert main(["60"]) == 0
