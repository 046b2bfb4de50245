"""What holds for every test."""

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.examples import examples

# No test fails because the machine is busy, so no example has a deadline.
settings.register_profile("quire", max_examples=examples(100), deadline=None)
settings.load_profile("quire")

# Services that tests start do not record into the folder of whoever runs the tests, unless a test says where.
# Each process of a parallel run has a folder of its own, because only one scheduler records into a folder.
if "PYTEST_XDIST_WORKER" in os.environ or "XDG_STATE_HOME" not in os.environ:
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="quire-tests-")

# Started in the background by a shell without job control, this process ignores SIGINT, and so would every process that
# a test starts and then interrupts. A handler of our own becomes the default again in those.
signal.signal(signal.SIGINT, signal.default_int_handler)


_ROOT = Path(__file__).resolve().parent
_WITH_SERVICES = {"chaos", "console", "e2e"}
"""Folders whose tests start whole services."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test into the group of its file; all tests that start services are one group.

    Only one process runs a group, so no two services under test compete for the processor.
    """
    for item in items:
        file = item.path.relative_to(_ROOT)
        group = "services" if file.parts[0] in _WITH_SERVICES else file.as_posix()
        item.add_marker(pytest.mark.xdist_group(group))
