"""Which version of a protocol two processes speak with each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.versions import UnsupportedVersionError, Versions, negotiate, spoken

NUMBERS = st.integers(0, 6)


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_the_newest_common_version_is_picked(a: int, b: int, c: int, d: int) -> None:
    """The newest common version is selected; without one, a refusal names both ranges and the side to upgrade."""
    ours, theirs = Versions(min(a, b), max(a, b)), spoken(c, d)
    common = set(range(ours.oldest, ours.newest + 1)) & set(range(theirs.oldest, theirs.newest + 1))
    if common:
        assert negotiate("plan", scheduler=ours, peer=theirs, role="worker") == max(common)
        return
    with pytest.raises(UnsupportedVersionError) as error:
        negotiate("plan", scheduler=ours, peer=theirs, role="worker")
    behind = "worker" if theirs.newest < ours.oldest else "scheduler"
    assert f"supports version {theirs}, the scheduler {ours}; upgrade the {behind} " in str(error.value)
