"""Promises of the leader lease: one scheduler leads, the others wait, and one takes over when the leader exits."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.leader_lease import LeaderLease
from shared.config import ConfigError
from tests.scheduler_svc.test_service import Stand

WAIT_S = 60


class Scheduler(Stand):
    """A scheduler process that shares a lease and all addresses with others."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.lease = folder / "leader"
        super().__init__(folder, f"--leader-lease={self.lease}", f"--journal={folder}/journal", *flags)

    def leader(self) -> int:
        """Return the process that leads, or led last."""
        return int(self.lease.read_text().split("/")[2])

    def until_standby_ready(self, ready: int) -> None:
        """Wait until the leader's metrics say whether a standby waits."""
        frontend, end = self.frontend(), time.monotonic() + WAIT_S
        frontend.hello()
        while [each.value for each in frontend.metrics() if each.name == "quire_standby_ready"] != [ready]:
            assert time.monotonic() < end, f"quire_standby_ready is not {ready}"
        frontend.close()

    def serves(self) -> None:
        """Run one request from the submission to its end."""
        frontend, worker = self.frontend(), self.worker()
        frontend.hello()
        worker.hello()
        frontend.submit(7, identity=os.urandom(16))
        for _ in range(4):
            worker.answer(worker.until("plan"), [0], [11])
        assert frontend.until("ends").ends
        frontend.close()
        worker.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Scheduler, Scheduler]]:
    """Yield a leader and its standby, which the leader's metrics show."""
    with Scheduler(tmp_path) as first:
        first.serves()
        with Scheduler(tmp_path) as second:
            first.until_standby_ready(1)
            yield first, second


def test_a_standby_serves_at_the_same_addresses_after_its_leader_was_killed(pair: tuple[Scheduler, Scheduler]) -> None:
    """The leader's death is enough: the standby reads the journal and serves front ends and workers."""
    leader, standby = pair
    assert standby.leader() == leader.process.pid

    leader.kill()
    standby.serves()

    assert standby.leader() == standby.process.pid
    standby.until_standby_ready(0)
    frontend = standby.frontend()
    frontend.hello()
    assert [each.value for each in frontend.metrics() if each.name == "quire_leader_pid"] == [standby.process.pid]
    frontend.close()


def test_a_standby_serves_after_its_leader_has_ended_in_order(pair: tuple[Scheduler, Scheduler]) -> None:
    """After SIGTERM the leader exits with 0 and the standby serves, so a new release can take the place of the old."""
    leader, standby = pair

    leader.process.terminate()
    assert leader.process.wait(WAIT_S) == 0
    standby.serves()

    assert standby.leader() == standby.process.pid


def test_a_standby_does_not_lead_while_its_leader_is_stopped(pair: tuple[Scheduler, Scheduler]) -> None:
    """A leader that is stopped keeps the lease, and serves when it continues."""
    leader, standby = pair

    leader.process.send_signal(signal.SIGSTOP)
    frontend = standby.frontend()
    frontend.send(b"")
    leader.process.send_signal(signal.SIGCONT)
    leader.serves()

    assert standby.leader() == leader.process.pid
    assert standby.process.poll() is None


def test_a_standby_ends_at_once_on_sigterm(pair: tuple[Scheduler, Scheduler]) -> None:
    """A standby that waits exits with 0, and its leader serves on."""
    leader, standby = pair
    standby.process.terminate()
    assert standby.process.wait(WAIT_S) == 0
    leader.serves()


def test_a_file_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    """The message names the setting and the remedy."""
    with pytest.raises(ConfigError, match=r"leader_lease \(--leader-lease\): .*Is a directory.*; use a file"):
        LeaderLease(tmp_path, "a b")


def test_a_file_of_another_kind_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """A user's file is not emptied, and a path that is not a regular file is not a lease."""
    notes, pipe = tmp_path / "notes.toml", tmp_path / "pipe"
    notes.write_text("[section]\nkey = 1\n")
    os.mkfifo(pipe)

    for path in (notes, pipe):
        with pytest.raises(
            ConfigError, match=r"leader_lease \(--leader-lease\): .* is not a lease file; use a new file"
        ):
            LeaderLease(path, "a b")

    assert notes.read_text() == "[section]\nkey = 1\n"


def test_a_service_at_other_addresses_is_refused_while_the_leader_lives(tmp_path: Path) -> None:
    """Otherwise one service's scheduler would replace another service's."""
    leader = LeaderLease(tmp_path / "leader", "a b")
    assert leader.acquire()

    with pytest.raises(ConfigError, match=r"is used by a scheduler at a b, not at a c; use the same addresses"):
        LeaderLease(tmp_path / "leader", "a c").acquire()

    leader.release()
    assert LeaderLease(tmp_path / "leader", "a c").acquire()
