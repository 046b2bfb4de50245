"""What holds for every test."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import settings
from xdist.remote import Producer

from tests.examples import SEED, examples
from tests.groups import GroupScheduling, place_of
from tests.selection import LEFT_OUT, daily

# Limit torch to one thread before anything imports it. Tiny tensors gain nothing from more threads, and become 30 times
# slower with them if other processes keep the cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Examples have no deadline, so that a busy machine fails no test.
settings.register_profile("quire", max_examples=examples(100), deadline=None)
settings.load_profile("quire")

_PID = os.getpid()
_SAME_INTERRUPT_S = 1.0
"""Time within which several signals are one: a terminal signals the whole group, and `tests.run` passes its own on."""
_interrupted_at = float("-inf")


def _interrupted(_number: int, _frame: FrameType | None) -> None:
    """Interrupt the run once, so that a second signal does not interrupt the teardown of the fixtures."""
    global _interrupted_at
    now = time.monotonic()
    is_same, _interrupted_at = now - _interrupted_at < _SAME_INTERRUPT_S, now
    if not is_same:
        raise KeyboardInterrupt


# A shell without job control starts background processes with SIGINT ignored. This process, and each process that a
# test starts and interrupts, would inherit that. Child processes reset our own handler to the default.
signal.signal(signal.SIGINT, _interrupted)


def _terminated(number: int, _frame: FrameType | None) -> None:
    """End the run in order, so that no service, process or folder of it is left."""
    if os.getpid() == _PID:
        _interrupted(number, _frame)
        return
    # A child process that a test forked.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


signal.signal(signal.SIGTERM, _terminated)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Distribute the tests of a parallel run by group."""
    return GroupScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make test`."""
    parser.addoption("--daily", action="store_true", help="omit tests marked release; draw from those marked drawn")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest groups of tests first. Select the tests of a daily run."""
    items.sort(key=lambda item: place_of(item.nodeid))
    if config.getoption("--daily"):
        items[:], left_out = daily(items, SEED)
        config.hook.pytest_deselected(items=left_out)
        if hasattr(config, "workeroutput"):  # a worker process of a parallel run
            config.workeroutput[LEFT_OUT] = [item.nodeid for item in left_out]


@pytest.fixture(scope="session", autouse=True)
def state_home() -> Iterator[Path]:
    """Return where services under test keep their state, unless a test says where: not where the user's services do.

    Each process of a parallel run has its own folder, because only one scheduler can record into a folder.
    """
    with tempfile.TemporaryDirectory(prefix="state-") as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_STATE_HOME", folder)
        yield Path(folder)
