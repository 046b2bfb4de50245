"""Promises of `quire serve --standby`: whatever dies, one scheduler leads, and a standby waits again."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from checks.chaos.fronts import leader_pid
from measure.testbed.service import Served, is_alive, serve
from quire import Client

WAIT_S = 60
FLAGS = ("--standby", "--record-dir=off", "--no-console", "--watchdog-s=10")


class Pair:
    """A service with two schedulers."""

    def __init__(self, served: Served, lease: Path) -> None:
        self.served, self._lease = served, lease

    def leader(self) -> int:
        """Return the process id of the leader."""
        return leader_pid(self._lease)

    def standby(self) -> int:
        """Return the process id of the standby."""
        leader = self.leader()
        return next(each.pid for each in self.served.children("scheduler") if each.pid != leader)

    def until_ready(self) -> None:
        """Wait until a scheduler leads, a standby waits, and the worker is connected; then serve a request."""

        def is_ready() -> bool:
            with suppress(OSError):
                metric = self.served.metric
                return metric("quire_standby_ready") == 1 and metric("quire_workers") == 1
            return False

        _until(is_ready)
        with Client(self.served.grpc) as client:
            assert client.generate("a", max_tokens=3, ignore_eos=True).result().finished is not None


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, f"not after {WAIT_S} s"
        time.sleep(0.02)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Yield a service that is ready. At the end, it must exit with 0 and leave no process."""
    lease = tmp_path / "leader"
    with serve("demo", *FLAGS, f"--leader-lease={lease}", f"--journal={tmp_path}/journal") as served:
        made = Pair(served, lease)
        made.until_ready()
        yield made


def test_schedulers_that_die_one_after_the_other_return(pair: Pair) -> None:
    """The standby dies first; or the leader dies, and its successor while it takes over."""
    os.kill(pair.standby(), signal.SIGKILL)
    os.kill(pair.leader(), signal.SIGKILL)
    pair.until_ready()

    first = pair.leader()
    os.kill(first, signal.SIGKILL)
    _until(lambda: pair.leader() != first)
    os.kill(pair.leader(), signal.SIGKILL)

    pair.until_ready()


def test_a_leader_that_is_stopped_is_replaced_only_if_it_hangs(pair: Pair) -> None:
    """A leader that returns in time still leads; after the watchdog's time, the standby leads."""
    leader = pair.leader()
    os.kill(leader, signal.SIGSTOP)
    # SIGCONT would discard a SIGSTOP that has not stopped all threads yet.
    _until(lambda: psutil.Process(leader).status() == psutil.STATUS_STOPPED)
    os.kill(leader, signal.SIGCONT)
    pair.until_ready()
    assert pair.leader() == leader

    os.kill(leader, signal.SIGSTOP)
    _until(lambda: pair.leader() != leader)

    pair.until_ready()


def test_a_service_that_is_stopped_during_a_takeover_exits(pair: Pair) -> None:
    """SIGTERM comes while no scheduler leads. The fixture checks the exit code."""
    os.kill(pair.leader(), signal.SIGKILL)

    pair.served.process.terminate()

    pair.served.process.wait(WAIT_S)


def test_no_scheduler_survives_the_supervisor(tmp_path: Path) -> None:
    """SIGKILL of the supervisor ends leader and standby, and the next service has the same journal and lease."""
    flags = (*FLAGS, f"--leader-lease={tmp_path}/leader", f"--journal={tmp_path}/journal")
    with serve("demo", *flags, end=False) as served:
        children = served.children()
        served.process.kill()
        _until(lambda: not any(is_alive(child) for child in children))

    with serve("demo", *flags) as served:
        Pair(served, tmp_path / "leader").until_ready()
