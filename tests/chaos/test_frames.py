"""Malformed messages of peers that have valid keys: no process crashes, hangs, or loses its requests."""

import pytest

from checks.chaos.frames import MIN_BATCHES, TARGETS, attack, check_growth


@pytest.mark.parametrize("target", TARGETS)
def test_malformed_frames_do_no_harm(target: str) -> None:
    """After two thousand mutated frames into a socket, the process is alive and serves the next correct peer."""
    attack(target, 2000, seed=1)


def test_memory_that_grows_with_every_frame_is_found() -> None:
    """The long campaign fails when a process keeps 2.5 KB per frame, and passes when its caches fill up once."""
    batches = range(MIN_BATCHES)
    check_growth("caches that fill up", [500.0 + min(50.0 * batch, 400.0) for batch in batches])

    with pytest.raises(AssertionError, match="leak: 225 MB more"):
        check_growth("leak", [500.0 + 2.5 * batch for batch in batches])
