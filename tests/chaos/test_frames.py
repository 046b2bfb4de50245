"""What peers say who have got in and mean harm: nothing that a process dies of, or forgets its work over."""

import pytest

from tests.chaos.frames import TARGETS, attack


@pytest.mark.parametrize("target", TARGETS)
def test_no_frame_does_harm(target: str) -> None:
    """Two thousand mutated frames into a socket: the process lives on and serves the next honest peer as ever."""
    attack(target, 2000, seed=1)
