"""Groups of tests: only one process of a parallel run executes the tests of a group.

The tests in a file form a group, because they share module fixtures. All tests that start services form one group, so
that no two services under test compete for the processor. The node id alone determines the group. pytest-xdist reads
marks from a private attribute that pytest has renamed, so it silently ignores its own groups. Test distribution
therefore does not depend on marks.
"""

from xdist.scheduler import LoadScopeScheduling

SERVICES = "services"
"""Group of the tests that start whole services."""
_WITH_SERVICES = ("tests/chaos/", "tests/console/", "tests/e2e/")
_INTERPRETED = "tests/kernels/test_interpreted.py"
_LONGEST = (
    SERVICES,
    f"{_INTERPRETED}::test_paged_attention",
    "tests/worker_svc/test_device_path.py",
    "tests/sim/test_sim.py",
    f"{_INTERPRETED}::test_sampling",
)
"""The slowest groups, slowest first. If one of them started last, it would run alone at the end."""


def group_of(node_id: str) -> str:
    """Return the group of a test."""
    file, _, name = node_id.partition("::")
    if file.startswith(_WITH_SERVICES):
        return SERVICES
    if file == _INTERPRETED:
        return f"{file}::{name.partition('[')[2].rstrip(']')}"  # Each of these tests runs one file.
    return file


def place_of(node_id: str) -> int:
    """Return a test's place in a run's order: the slowest groups come first."""
    group = group_of(node_id)
    return _LONGEST.index(group) if group in _LONGEST else len(_LONGEST)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Distribution that hands out one group at a time to each process, in the order of the tests."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
