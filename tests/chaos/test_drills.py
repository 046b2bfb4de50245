"""Leader, standby and etcd are lost together: clients only see pauses."""

import shutil
from pathlib import Path

import pytest

from checks.chaos.drills import DRILLS, run


@pytest.mark.skipif(shutil.which("etcd") is None, reason="the lease needs etcd")
@pytest.mark.every(3)
def test_no_token_is_lost_repeated_or_changed_whatever_is_lost_at_once(tmp_path: Path) -> None:
    """A scheduler leads again after each drill, and each stream has the token of each position."""
    figures = run(tmp_path, streams=24)

    assert figures["drills"] == len(DRILLS)
    assert figures["tokens"] > 0
