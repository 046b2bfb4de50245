"""Promises of `quire serve --standby`: whatever dies, one scheduler leads, and a standby waits again."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from checks.chaos.fronts import leader_pid
from measure.testbed.service import PATIENCE_S, Served, serve, until
from quire import Client

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

        until(is_ready, "the service is ready")
        with Client(self.served.grpc) as client:
            assert client.generate("a", max_tokens=3, ignore_eos=True).result().finished is not None


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
    until(lambda: pair.leader() != first, "another scheduler leads")
    os.kill(pair.leader(), signal.SIGKILL)

    pair.until_ready()


def test_a_leader_that_is_stopped_is_replaced_only_if_it_hangs(pair: Pair) -> None:
    """A leader that returns in time still leads; after the watchdog's time, the standby leads."""
    leader = pair.leader()
    os.kill(leader, signal.SIGSTOP)
    # SIGCONT would discard a SIGSTOP that has not stopped all threads yet.
    until(lambda: psutil.Process(leader).status() == psutil.STATUS_STOPPED, "the leader is stopped")
    os.kill(leader, signal.SIGCONT)
    pair.until_ready()
    assert pair.leader() == leader

    os.kill(leader, signal.SIGSTOP)
    until(lambda: pair.leader() != leader, "another scheduler leads")

    pair.until_ready()


def test_a_service_that_is_stopped_during_a_takeover_exits(pair: Pair) -> None:
    """SIGTERM comes while no scheduler leads. The fixture checks the exit code."""
    os.kill(pair.leader(), signal.SIGKILL)

    pair.served.process.terminate()

    pair.served.process.wait(PATIENCE_S)


def test_no_scheduler_survives_the_supervisor(tmp_path: Path) -> None:
    """After SIGKILL of the supervisor, both schedulers exit, and a new service can use the same journal and lease."""
    flags = (*FLAGS, f"--leader-lease={tmp_path}/leader", f"--journal={tmp_path}/journal")
    with serve("demo", *flags, end=False) as served:
        children = served.children()
        served.process.kill()
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not alive

    with serve("demo", *flags) as served:
        Pair(served, tmp_path / "leader").until_ready()
