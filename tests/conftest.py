"""What holds for every test."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings

from tests.examples import examples

# One thread of torch, before anything imports it: tiny tensors gain nothing from more, and lose a factor of thirty to
# them when other processes keep the cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test fails because the machine is busy, so no example has a deadline.
settings.register_profile("quire", max_examples=examples(100), deadline=None)
settings.load_profile("quire")

# Started in the background by a shell without job control, this process ignores SIGINT, and so would every process that
# a test starts and then interrupts. A handler of our own becomes the default again in those.
signal.signal(signal.SIGINT, signal.default_int_handler)

_PID = os.getpid()


def _terminated(number: int, _frame: FrameType | None) -> None:
    """End the run in order, so that no service, process or folder of it is left."""
    if os.getpid() == _PID:
        raise KeyboardInterrupt
    # A child that a test has forked.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _terminated)

_ROOT = Path(__file__).resolve().parent
_WITH_SERVICES = {"chaos", "console", "e2e"}
"""Folders whose tests start whole services."""
_INTERPRETED = "kernels/test_interpreted.py"
_LONGEST = (
    "services",
    f"{_INTERPRETED}-test_paged_attention",
    "worker_svc/test_device_path.py",
    "sim/test_sim.py",
    f"{_INTERPRETED}-test_sampling",
)
"""The groups that take longest, longest first. Begun last, one of them would keep a single process busy."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test into the group of its file; all tests that start services are one group.

    Only one process runs a group, so no two services under test compete for the processor. The longest groups are begun
    first.
    """
    groups = {item: _group(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    places = {group: place for place, group in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(groups[item], len(places)))


def _group(item: pytest.Item) -> str:
    file = os.path.relpath(item.path, _ROOT)
    if file.partition("/")[0] in _WITH_SERVICES:
        return "services"
    if file == _INTERPRETED:
        return f"{file}-{item.name.partition('[')[2].rstrip(']')}"  # each of these tests runs a file
    return file


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return where services under test keep their state, unless a test says where: not where the user's services do.

    Each process of a parallel run has a folder of its own, because only one scheduler records into a folder.
    """
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", str(folder))
        yield folder
    # pytest would keep the folder of a run in which a test failed.
    shutil.rmtree(folder, ignore_errors=True)
