"""The benchmark of a takeover finishes, and its streams get the right tokens; its times are not tested."""

import shutil
from pathlib import Path

import pytest

from measure.scheduler.takeover import Case, measure


@pytest.mark.skipif(shutil.which("etcd") is None, reason="the lease needs etcd")
@pytest.mark.every(3)
def test_every_stream_continues_without_its_prompt_being_computed_again(tmp_path: Path) -> None:
    """Each worker computes at most a block of each of its streams again."""
    result = measure(Case(workers=3, streams=24, frontends=2, step_ms=20.0, settle_s=0.5), tmp_path)

    assert result.wrong_tokens == 0
    assert result.prefilled == 24 * 64
    assert result.prefilled_again <= 24 * 16
    assert 0 < result.pause_p50 <= result.pause_p99 <= result.pause_max
