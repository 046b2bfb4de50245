"""Promises of a standby on another machine, with real processes: it has the journal, and one scheduler leads."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from protos.quire.journal.v1.replication_pb2 import PeerMessage, StepDown
from protos.quire.link.v1 import link_pb2
from quire_server.cli.keys import create
from scheduler_svc.standby.peers import PeerLink
from shared.columns import from_column
from tests.scheduler_svc.test_service import FrontendPeer, Stand, WorkerPeer

WAIT_S = 60
IDENTITY = b"0123456789abcdef"


class Scheduler(Stand):
    """A scheduler process with a folder, addresses and a journal of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        super().__init__(
            folder, f"--standby-address=ipc://{folder}/s", f"--journal={folder}/journal", "--record-dir=off", *flags
        )

    @property
    def address(self) -> str:
        """Address for standbys."""
        return f"ipc://{self.folder}/s"

    def until(self, name: str, holds: Callable[[float], bool]) -> float:
        """Wait until a metric has a value, and return it."""
        frontend, end = self.frontend(), time.monotonic() + WAIT_S
        frontend.hello()
        while True:
            values = [each.value for each in frontend.metrics() if each.name == name]
            if values and holds(values[0]):
                frontend.close()
                return values[0]
            assert time.monotonic() < end, f"{name} is {values}"


def _take_over(address: str, *flags: str) -> int:
    """Make the standby at this address lead, and return its leader number."""
    done = subprocess.run(
        [sys.executable, "-m", "quire_server.cli.main", "scheduler", f"--take-over={address}", *flags],
        capture_output=True, timeout=WAIT_S, check=False, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def _begin(scheduler: Scheduler) -> tuple[FrontendPeer, WorkerPeer]:
    """Run a resumable request until its second token."""
    frontend, worker = scheduler.frontend(), scheduler.worker()
    frontend.hello()
    worker.hello()
    frontend.until("state")
    frontend.submit(7, identity=IDENTITY)
    for token in (11, 12):
        worker.answer(worker.until("plan"), [0], [token])
        frontend.until("tokens")
    return frontend, worker


def _log(scheduler: Scheduler) -> list[int]:
    """Return the tokens of the request that a scheduler knows."""
    frontend = scheduler.frontend()
    frontend.hello()
    frontend.send(link_pb2.FrontendMessage(resume_questions=[link_pb2.ResumeQuestion(number=1, identity=IDENTITY)]))
    while True:
        message = link_pb2.CoreMessage.FromString(frontend.receive())
        if message.resume_replies:
            frontend.close()
            tokens: list[int] = from_column(message.resume_replies[0].submission.token_ids).tolist()
            return tokens


@pytest.fixture
def pair(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Scheduler, Scheduler]]:
    """Yield a leader, and a standby that has the leader's whole journal."""
    flags = getattr(request, "param", ())
    leader = Scheduler(tmp_path / "a", *flags)
    with leader, Scheduler(tmp_path / "b", f"--standby-of={leader.address}", *flags) as standby:
        leader.until("quire_standby_ready", lambda value: value == 1)
        yield leader, standby


def test_a_standby_that_takes_over_by_command_knows_every_delivered_token(pair: tuple[Scheduler, Scheduler]) -> None:
    """The leader hands over the rest of its journal and exits with 0; the number of the standby is higher."""
    leader, standby = pair
    number = leader.until("quire_leader_number", lambda value: value > 0)
    _begin(leader)

    taken = _take_over(standby.address)

    assert taken > number
    assert leader.process.wait(WAIT_S) == 0
    assert _log(standby) == [1, 2, 3, 11, 12]
    worker = standby.worker()
    worker.hello()
    assert worker.until("welcome").welcome.leader_number == taken


@pytest.mark.parametrize("pair", [("--journal-sync=standby",)], indirect=True)
def test_a_standby_has_each_token_before_its_client_if_the_journal_is_synchronous(
    pair: tuple[Scheduler, Scheduler],
) -> None:
    """After SIGKILL of the leader, nothing that a client has is missing."""
    leader, standby = pair
    _begin(leader)
    leader.kill()

    _take_over(standby.address)

    assert _log(standby) == [1, 2, 3, 11, 12]


@pytest.mark.parametrize("pair", [("--journal-sync=standby",)], indirect=True)
def test_a_standby_follows_its_leader_after_a_proposal_of_a_higher_number(pair: tuple[Scheduler, Scheduler]) -> None:
    """A scheduler that asks for the lead proposes a number, and may never lead under it."""
    leader, standby = pair
    with zmq.Context() as context:
        asking = PeerLink(context, standby.address, lambda _socket: None)
        with closing(asking):
            proposal = PeerMessage(step_down=StepDown(leader_number=(1 << 63), leads=False))
            end = time.monotonic() + WAIT_S
            while not asking.send(proposal):
                assert time.monotonic() < end, "no connection"
                asking.socket.poll(10, zmq.POLLOUT)
            assert asking.socket.poll(WAIT_S * 1000), "no response"

            _begin(leader)
            leader.kill()

            _take_over(standby.address)
            assert _log(standby) == [1, 2, 3, 11, 12]


@pytest.mark.parametrize("pair", [("--journal-sync=standby",)], indirect=True)
def test_a_standby_that_is_stopped_delays_tokens_only_until_it_is_dropped(pair: tuple[Scheduler, Scheduler]) -> None:
    """The leader serves on without it, and the standby catches up when it continues."""
    leader, standby = pair
    standby.process.send_signal(signal.SIGSTOP)

    _begin(leader)

    leader.until("quire_standby_dropped_total", lambda value: value >= 1)
    leader.until("quire_standby_ready", lambda value: value == 0)
    standby.process.send_signal(signal.SIGCONT)
    leader.until("quire_standby_ready", lambda value: value == 1)
    leader.kill()
    _take_over(standby.address)
    assert _log(standby) == [1, 2, 3, 11, 12]


@pytest.mark.parametrize("pair", [("--journal-sync=standby",)], indirect=True)
def test_a_leader_that_was_stopped_sends_nothing_after_it_was_replaced(pair: tuple[Scheduler, Scheduler]) -> None:
    """It continues with a result of its worker and a plan that is due, but steps down before it sends anything."""
    leader, standby = pair
    frontend, worker = _begin(leader)
    plan = worker.until("plan")
    leader.process.send_signal(signal.SIGSTOP)
    taken = _take_over(standby.address)
    worker.answer(plan, [0], [13])
    while frontend.has_message():
        frontend.receive()

    leader.process.send_signal(signal.SIGCONT)

    assert leader.process.wait(WAIT_S) == 0
    assert not frontend.has_message()
    assert _log(standby) == [1, 2, 3, 11, 12]
    standby.until("quire_leader_number", lambda value: value == taken)


def test_schedulers_hand_over_to_each_other_and_back(tmp_path: Path) -> None:
    """With --standby-of at both, the scheduler that steps down becomes the standby of the other."""
    addresses = [f"ipc://{tmp_path}/{name}/s" for name in "ab"]
    with ExitStack() as stack:
        leader = stack.enter_context(Scheduler(tmp_path / "a", f"--standby-of={addresses[1]}"))
        other = stack.enter_context(Scheduler(tmp_path / "b", f"--standby-of={addresses[0]}"))
        numbers = [_take_over(leader.address)]
        _begin(leader)
        for old, new in ((leader, other), (other, leader), (leader, other)):
            old.until("quire_standby_ready", lambda value: value == 1)
            numbers.append(_take_over(new.address))
            assert _log(new) == [1, 2, 3, 11, 12]

        assert numbers == sorted(set(numbers))
        assert leader.process.poll() is None


def test_a_scheduler_without_an_allowed_key_gets_no_journal(tmp_path: Path) -> None:
    """Standbys authenticate as all other peers do."""
    create(tmp_path / "keys")
    create(tmp_path / "others")
    keys, others = f"--keys={tmp_path}/keys", f"--keys={tmp_path}/others"
    with ExitStack() as stack:
        leader = stack.enter_context(Scheduler(tmp_path / "a", keys))
        standby = stack.enter_context(Scheduler(tmp_path / "b", f"--standby-of={leader.address}", keys))
        stack.enter_context(Scheduler(tmp_path / "c", f"--standby-of={leader.address}", others))
        end = time.monotonic() + WAIT_S
        while not list((tmp_path / "b/journal").glob("*.journal")):
            assert time.monotonic() < end
            time.sleep(0.05)

        _take_over(standby.address, keys)

        assert leader.process.wait(WAIT_S) == 0
        assert not list((tmp_path / "c/journal").glob("**/*.journal"))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ((), "standbys need a journal; add --journal FOLDER"),
        (
            ("--journal={folder}/j", "--leader-lease={folder}/lease"),
            "cannot be combined with --leader-lease FILE, which is for schedulers on one machine; remove one of them",
        ),
    ],
)
def test_a_standby_with_unsuitable_settings_is_refused(tmp_path: Path, flags: Sequence[str], reason: str) -> None:
    """The message names the setting and the remedy."""
    options = [f"--standby-of=ipc://{tmp_path}/s", *(flag.format(folder=tmp_path) for flag in flags)]
    failed = subprocess.run(
        [sys.executable, "-m", "quire_server.cli.main", "scheduler", *options],
        capture_output=True, timeout=WAIT_S, check=False, text=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert failed.returncode == 1
    assert failed.stderr == f"quire scheduler: standby_of (--standby-of): {reason}\n"
