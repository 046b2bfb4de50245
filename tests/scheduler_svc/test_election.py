"""Promises of a leader lease in etcd or Kubernetes: one scheduler leads per number, and another one if it is lost."""

import base64
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest
import zmq

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.service import SchedulerService
from scheduler_svc.standby.election import UNUSABLE, Election, LeaseError, LeaseStore
from scheduler_svc.standby.leader_number import Numbers
from scheduler_svc.standby.stores import open_store
from scheduler_svc.standby.waiting import Standby, Succession
from shared.columns import to_column
from shared.config import ConfigError, SchedulerConfig
from shared.frames import LINK_MAX_MESSAGE, PLAN_MAX_MESSAGE
from shared.telemetry import Telemetry
from tests.scheduler_svc import lease_servers
from tests.scheduler_svc.test_service import FrontendPeer, WorkerPeer
from tests.scheduler_svc.test_standby import Scheduler, _begin, _log, _take_over

WAIT_S = 60
DURATION_S = 1.0
TIMEOUT_S = 5.0

Open = Callable[[str], LeaseStore]
"""Opens the lease for the holder with this name."""


@pytest.fixture(params=["etcd", "kubernetes"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Yield a function that opens a new lease."""
    with ExitStack() as stack:
        if request.param == "etcd":
            server, _ = stack.enter_context(lease_servers.etcd(tmp_path))
            yield lambda holder: open_store(f"etcd://{server}/quire", holder, DURATION_S)
        else:
            environ, account, _ = stack.enter_context(lease_servers.kubernetes(tmp_path))
            yield lambda holder: open_store("kubernetes", holder, DURATION_S, environ=environ, account=account)


def _acquire(store: LeaseStore, highest: int = 0) -> int:
    """Acquire a lease that has ended or is about to end."""
    end = time.monotonic() + WAIT_S
    while not (number := store.acquire(highest, TIMEOUT_S)):
        assert time.monotonic() < end, "the lease does not end"
        time.sleep(0.05)
    return number


def test_one_of_two_holds_a_lease_and_its_successor_has_a_higher_number(opened: Open) -> None:
    """Also the number of a successor that knows a higher number than the store."""
    first, second = opened("first"), opened("second")
    number = first.acquire(0, TIMEOUT_S)
    assert number > 1e12
    assert first.renew(TIMEOUT_S)
    assert second.acquire(0, TIMEOUT_S) == 0
    assert second.is_held(TIMEOUT_S)

    first.revoke(first.token, TIMEOUT_S)

    assert not second.is_held(TIMEOUT_S)
    assert second.acquire(0, TIMEOUT_S) == number + 1
    second.revoke(second.token, TIMEOUT_S)
    assert first.acquire(number + 100, TIMEOUT_S) == number + 101


def test_a_lease_that_is_not_renewed_ends_and_cannot_be_renewed(opened: Open) -> None:
    """Its holder learns that another scheduler has it."""
    first, second = opened("first"), opened("second")
    number = first.acquire(0, TIMEOUT_S)

    assert _acquire(second) == number + 1

    assert not first.renew(TIMEOUT_S)
    assert first.holder == "second"
    assert first.acquire(number, TIMEOUT_S) == 0
    assert second.renew(TIMEOUT_S)


def test_a_token_revokes_one_lease_and_no_later_one(opened: Open) -> None:
    """Another process that has the token, such as the guard, ends the lease at once, also after it was renewed."""
    first, second, guard = opened("first"), opened("second"), opened("first")
    number = first.acquire(0, TIMEOUT_S)
    assert first.renew(TIMEOUT_S)
    token = first.token

    guard.revoke(token, TIMEOUT_S)

    assert second.acquire(0, TIMEOUT_S) == number + 1
    guard.revoke(token, TIMEOUT_S)
    assert second.renew(TIMEOUT_S)
    second.revoke(second.token, TIMEOUT_S)
    again = first.acquire(0, TIMEOUT_S)
    guard.revoke(token, TIMEOUT_S)
    assert again == number + 2
    assert first.renew(TIMEOUT_S)


def test_a_waiting_scheduler_learns_at_once_that_a_lease_in_etcd_has_ended(tmp_path: Path) -> None:
    """It neither polls nor waits for the timeout; a lease that does not end is not reported."""
    with lease_servers.etcd(tmp_path) as (server, _):
        first, second = (open_store(f"etcd://{server}/quire", name, 60.0) for name in ("first", "second"))
        assert first.acquire(0, TIMEOUT_S)
        assert not second.acquire(0, TIMEOUT_S)
        assert not second.await_end(0.1)

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second.await_end, WAIT_S)
            first.revoke(first.token, TIMEOUT_S)
            assert waiting.result()

        assert second.acquire(0, TIMEOUT_S)


def test_a_renewed_lease_does_not_end(opened: Open) -> None:
    """A scheduler that waits for three durations does not get it."""
    first, second = opened("first"), opened("second")
    assert first.acquire(0, TIMEOUT_S)
    end = time.monotonic() + 3 * DURATION_S
    while time.monotonic() < end:
        assert first.renew(TIMEOUT_S)
        assert second.acquire(0, TIMEOUT_S) == 0
        time.sleep(DURATION_S / 10)


def test_a_lease_in_a_store_lasts_as_long_as_its_holder_leads(tmp_path: Path) -> None:
    """Stores count whole seconds. A shorter lease would end while its holder still leads, for 0.9 of the duration."""
    with lease_servers.kubernetes(tmp_path) as (environ, account, stored):
        store = open_store("kubernetes://quire/quire", "holder", 1.4, environ=environ, account=account)
        assert store.acquire(0, TIMEOUT_S)

        assert stored.content["spec"]["leaseDurationSeconds"] == 2


def test_an_election_has_one_winner_at_any_time(opened: Open) -> None:
    """Five schedulers stand; the winner ends or is cut off; no two hold the lease at the same time."""
    numbers: list[int] = []
    elections = [Election(opened(f"holder-{index}"), DURATION_S) for index in range(5)]
    for each in elections:
        each.stand(0)
    while elections:
        end = time.monotonic() + WAIT_S
        while not (leading := [each for each in elections if each.may_send(time.monotonic())]):
            assert time.monotonic() < end, "no scheduler leads"
            time.sleep(0.01)
        assert len(leading) == 1
        numbers.append(leading[0].number)
        leading[0].end()
        elections.remove(leading[0])
    assert numbers == sorted(set(numbers))


class _Watched:
    """Store whose lease another scheduler holds for ever; a watch lasts until `release` is set."""

    holder, token = "other", ""

    def __init__(self) -> None:
        self.is_watched, self.release = threading.Event(), threading.Event()

    def acquire(self, highest: int, timeout_s: float) -> int:
        return 0

    def renew(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def is_held(self, timeout_s: float) -> bool:
        return True

    def await_end(self, timeout_s: float) -> bool:
        self.is_watched.set()
        return self.release.wait(WAIT_S)

    def revoke(self, token: str, timeout_s: float) -> None:
        raise NotImplementedError


def test_a_standby_that_exits_does_not_wait_for_its_watch() -> None:
    """A watch takes as long as a fifth of the lease, which may be 12 s."""
    store = _Watched()
    election = Election(store, 60.0)
    election._highest, election.interval_s = 0, 0.01
    assert store.is_watched.wait(WAIT_S)

    election.end()

    assert not store.release.is_set()
    assert election.number == 0
    store.release.set()


def _whole(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content)


@pytest.mark.parametrize(
    "content",
    [
        b"null",
        b"[]",
        b"[" * 200_000,
        b'{"responses": [{"response_range": []}, {"response_range": []}]}',
        b'{"result": {"TTL": 1e999}, "header": {"revision": 1e999},'
        b' "responses": [{"response_range": {"kvs": [{"value": ""}]}}, {"response_range": {}}]}',
    ],
    ids=["null", "list", "deep", "lists", "infinity"],
)  # fmt: skip
def test_a_store_that_sends_something_else_is_asked_again(content: bytes) -> None:
    """For example, a proxy in front of etcd sends something else for a while. The scheduler stands until it leads."""
    with lease_servers.responding(_whole(content)) as (server, requests):
        store = open_store(f"etcd://{server}/quire", "holder", DURATION_S)
        with pytest.raises(UNUSABLE):
            store.renew(TIMEOUT_S)
        requests.clear()
        election = Election(store, 0.1)
        election.stand(0)

        end = time.monotonic() + WAIT_S
        while len(requests) < 3:
            assert time.monotonic() < end, "the scheduler does not stand any more"
            time.sleep(0.01)

        assert not election.number
        election.end()


@pytest.mark.parametrize("number", [-1, 1 << 63])
def test_a_stored_number_that_cannot_be_sent_is_refused(number: int) -> None:
    """A leader with such a number would fail when it sends the number."""
    value = base64.b64encode(str(number).encode()).decode()
    stored = {"responses": [{"response_range": {}}, {"response_range": {"kvs": [{"value": value}]}}]}
    with lease_servers.responding(_whole(json.dumps(stored).encode())) as (server, _):
        store = open_store(f"etcd://{server}/quire", "holder", DURATION_S)

        with pytest.raises(ValueError, match=f"'{number}' is no leader number"):
            store.acquire(0, TIMEOUT_S)


def test_a_response_that_says_nothing_about_the_lease_does_not_end_it() -> None:
    """Otherwise a scheduler would exit because a proxy responds to one renewal."""
    with lease_servers.responding(_whole(b'{"message": "not now"}')) as (server, _):
        store = open_store(f"etcd://{server}/quire", "holder", DURATION_S)

        with pytest.raises(LeaseError, match="not now"):
            store.renew(TIMEOUT_S)


def test_a_response_without_the_written_object_is_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a proxy responds for the API server, a scheduler neither leads nor counts its lease as renewed."""
    with lease_servers.kubernetes(tmp_path) as (environ, account, _):
        holder, other = (
            open_store("kubernetes", name, DURATION_S, environ=environ, account=account) for name in ("holder", "other")
        )
        assert _acquire(holder)
        monkeypatch.setattr(
            lease_servers.LeaseObject, "handle", lambda _, method, *__: (404 if method == "GET" else 200, {})
        )

        with pytest.raises(UNUSABLE):
            holder.renew(TIMEOUT_S)
        with pytest.raises(UNUSABLE):
            other.acquire(0, TIMEOUT_S)


def test_a_store_that_sends_slowly_does_not_hold_up_the_next_one() -> None:
    """Each byte arrives in time; the whole response does not."""
    slowly = [b"HTTP/1.1 200 OK\r\nContent-Length: 30\r\n\r\n", *[b" "] * 28, b"{}"]
    good = _whole(b'{"result": {"TTL": "5"}}')
    with (
        lease_servers.responding(*slowly, pause_s=0.1) as (slow, _),
        lease_servers.responding(good) as (quick, _),
    ):
        store = open_store(f"etcd://{slow},{quick}/quire", "holder", DURATION_S)

        assert store.renew(2.0)
        assert not open_store(f"etcd://{slow}/quire", "holder", DURATION_S).await_end(0.2)


class _Held:
    """Store whose lease another scheduler holds until `release`."""

    holder, token = "other", ""

    def __init__(self) -> None:
        self.looks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_held = True

    def release(self) -> None:
        """End the lease, and wait until this was seen."""
        self._is_held = False
        while self.looks.get(timeout=WAIT_S):
            pass

    def acquire(self, highest: int, timeout_s: float) -> int:
        return 0 if self._is_held else highest + 1

    def renew(self, timeout_s: float) -> bool:
        return True

    def is_held(self, timeout_s: float) -> bool:
        self.looks.put(self._is_held)
        return self._is_held

    def await_end(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def revoke(self, token: str, timeout_s: float) -> None:
        pass


def test_a_standby_that_hears_no_leader_lets_others_acquire_its_lease_first(tmp_path: Path) -> None:
    """Otherwise, it would compete with a standby that has the whole journal."""
    store = _Held()
    election = Election(store, 60.0)
    election.interval_s = 0.01
    config = SchedulerConfig(journal=f"{tmp_path}/standby", standby_of=f"ipc://{tmp_path}/s")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    standby = Standby(context, config, Numbers(own=5, highest=6), election=election)
    standby._heard_leader_at = -1e9
    for _ in range(2):
        store.looks.get(timeout=WAIT_S)
    now = time.monotonic()

    standby._elected(now)
    assert election._highest is None
    store.release()
    standby._elected(time.monotonic() + election.grace_s - 1)
    assert election._highest is None
    standby._elected(time.monotonic() + election.grace_s)
    assert election._highest == 6

    election.end()
    standby.close()
    context.term()


class _EndingLease:
    """Lease that ends when `has_ended` is set."""

    has_ended = False

    def may_send(self, now: float) -> bool:
        return not self.has_ended


def _leader(folder: Path, lease: _EndingLease, telemetry: Telemetry) -> SchedulerService:
    """Return a leader with number 7, a journal and an address for standbys."""
    config = SchedulerConfig(
        frontend_address=f"ipc://{folder}/f", worker_address=f"ipc://{folder}/w",
        standby_address=f"ipc://{folder}/s", journal=f"{folder}/journal", record_dir="off",
    )  # fmt: skip
    return SchedulerService(config, telemetry, 1 << 40, succession=Succession(7), election=cast("Election", lease))


def test_a_leader_that_is_stopped_within_a_turn_sends_nothing_of_that_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends after the turn has read a result: neither its token nor the next plan is sent."""
    lease, telemetry = _EndingLease(), Telemetry("test")
    service = _leader(tmp_path, lease, telemetry)
    take_in, num_results = service._take_in_results, 0

    def ends_after_a_result() -> bool:
        more = take_in()
        lease.has_ended = service._num_results > num_results
        return more

    thread = threading.Thread(target=service.run)
    thread.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    frontend = FrontendPeer(context, f"ipc://{tmp_path}/f", "f/1", LINK_MAX_MESSAGE)
    worker = WorkerPeer(context, f"ipc://{tmp_path}/w", "w/1", PLAN_MAX_MESSAGE)
    try:
        frontend.hello()
        worker.hello()
        frontend.submit(1)
        plan = worker.until("plan")
        num_results = service._num_results
        monkeypatch.setattr(service, "_take_in_results", ends_after_a_result)
        while frontend.has_message():
            frontend.receive()

        worker.answer(plan, [0], [11])
        thread.join(WAIT_S)

        assert not thread.is_alive()
        assert service.successor == 8
        while frontend.has_message(200):
            assert not link_pb2.CoreMessage.FromString(frontend.receive()).tokens
    finally:
        lease.has_ended = True
        service.stop()
        thread.join(WAIT_S)
        frontend.close()
        worker.close()
        service.close()
        telemetry.shutdown()
        context.destroy(linger=0)


def test_a_leader_whose_lease_ends_while_it_hands_over_sends_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGTERM, the process may be stopped while standbys read its journal. Another scheduler then leads."""
    lease, telemetry = _EndingLease(), Telemetry("test")
    service = _leader(tmp_path, lease, telemetry)
    drained: list[float] = []
    monkeypatch.setattr(service._frontends, "drain", drained.append)
    monkeypatch.setattr(service._standbys, "hand_over", lambda *_, **__: setattr(lease, "has_ended", True))
    try:
        service.stop()
        service.run()

        assert not drained
        assert service.successor == 8
    finally:
        service.close()
        telemetry.shutdown()


def test_a_lease_object_of_kubernetes_may_be_changed_by_others(tmp_path: Path) -> None:
    """The holder still renews it after a label was added, and not after it was deleted."""
    with lease_servers.kubernetes(tmp_path) as (environ, account, stored):
        store = open_store("kubernetes://quire/quire", "holder", DURATION_S, environ=environ, account=account)
        number = store.acquire(0, TIMEOUT_S)
        assert stored.content["spec"]["holderIdentity"] == "holder"
        assert stored.content["metadata"]["annotations"] == {"quire.dev/leader-number": str(number)}
        stored.handle("PUT", "quire", stored.content)
        assert store.renew(TIMEOUT_S)
        (account / "token").write_text("expired")
        with pytest.raises(LeaseError, match="status 401: Unauthorized"):
            store.renew(TIMEOUT_S)
        (account / "token").write_text(lease_servers.TOKEN)
        stored.content = None
        assert not store.renew(TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Cell:
    """Two schedulers that replicate to each other, with a lease in etcd."""

    schedulers: tuple[Scheduler, Scheduler]
    etcd: "subprocess.Popen[bytes]"

    def leader(self) -> tuple[Scheduler, Scheduler]:
        """Return the scheduler that leads, and the other one, once the latter has the whole journal."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for scheduler, other in (self.schedulers, self.schedulers[::-1]):
                if not scheduler.killed and _leads(scheduler):
                    if not other.killed:
                        scheduler.until("quire_standby_ready", lambda value: value == 1)
                    return scheduler, other
        raise AssertionError("no scheduler leads")


def _leads(scheduler: Scheduler) -> bool:
    """Return whether a scheduler responds to a front end."""
    frontend = scheduler.frontend()
    try:
        frontend.send_hello()
        return frontend.has_message(1000)
    finally:
        frontend.close()


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    """Yield two schedulers, one of which leads soon."""
    with lease_servers.etcd(tmp_path) as (server, process), ExitStack() as stack:
        flags = (f"--leader-lease=etcd://{server}/quire", f"--leader-lease-s={DURATION_S}", "--journal-sync=standby")
        addresses = [f"ipc://{tmp_path}/{name}/s" for name in "ab"]
        first = stack.enter_context(Scheduler(tmp_path / "a", f"--standby-of={addresses[1]}", *flags))
        second = stack.enter_context(Scheduler(tmp_path / "b", f"--standby-of={addresses[0]}", *flags))
        yield Cell((first, second), process)


def test_a_standby_leads_after_the_leader_was_killed(cell: Cell) -> None:
    """It has every token that was delivered, and leads under a higher number."""
    leader, standby = cell.leader()
    number = leader.until("quire_leader_number", lambda value: value > 0)
    _begin(leader)
    leader.kill()

    standby.until("quire_leader_number", lambda value: value > number)

    assert _log(standby) == [1, 2, 3, 11, 12]


def test_a_standby_need_not_wait_for_the_lease_of_a_leader_that_was_killed(tmp_path: Path) -> None:
    """The guard of the leader revokes a lease that would end after the test's timeout."""
    with lease_servers.etcd(tmp_path) as (server, _), ExitStack() as stack:
        flags = (f"--leader-lease=etcd://{server}/quire", "--leader-lease-s=60", "--journal-sync=standby")
        addresses = [f"ipc://{tmp_path}/{name}/s" for name in "ab"]
        leader = stack.enter_context(Scheduler(tmp_path / "a", f"--standby-of={addresses[1]}", *flags))
        leader.until("quire_leader_number", lambda value: value > 0)
        standby = stack.enter_context(Scheduler(tmp_path / "b", f"--standby-of={addresses[0]}", *flags))
        leader.until("quire_standby_ready", lambda value: value == 1)
        began = time.monotonic()
        leader.kill()

        standby.until("quire_leader_number", lambda value: value > 0)

        assert time.monotonic() - began < WAIT_S / 2


def test_a_leader_that_was_stopped_becomes_the_standby(cell: Cell) -> None:
    """It sends nothing after it continues, although a result of its worker has arrived meanwhile."""
    leader, standby = cell.leader()
    frontend, worker = _begin(leader)
    plan = worker.until("plan")
    leader.process.send_signal(signal.SIGSTOP)
    standby.until("quire_leader_number", lambda value: value > 0)
    worker.answer(plan, [0], [13])
    while frontend.has_message():
        frontend.receive()

    leader.process.send_signal(signal.SIGCONT)

    standby.until("quire_standby_ready", lambda value: value == 1)
    assert not frontend.has_message()
    assert _log(standby) == [1, 2, 3, 11, 12]


def test_a_leader_that_exits_hands_over_at_once(cell: Cell) -> None:
    """It releases the lease, and its journal is complete at the standby."""
    leader, standby = cell.leader()
    _begin(leader)
    leader.process.terminate()
    assert leader.process.wait(WAIT_S) == 0

    standby.until("quire_leader_number", lambda value: value > 0)

    assert _log(standby) == [1, 2, 3, 11, 12]


def test_a_command_changes_the_leader(cell: Cell) -> None:
    """The old leader releases the lease and becomes the standby of the new one."""
    for _ in range(3):
        leader, standby = cell.leader()
        number = leader.until("quire_leader_number", lambda value: value > 0)
        assert _take_over(standby.address) > number
        standby.until("quire_standby_ready", lambda value: value == 1)


def test_no_scheduler_leads_while_the_store_is_away(cell: Cell) -> None:
    """The leader steps down before its lease ends, and a scheduler leads when the store is back."""
    leader, standby = cell.leader()
    frontend, worker = _begin(leader)
    plan = worker.until("plan")
    cell.etcd.send_signal(signal.SIGSTOP)
    end = time.monotonic() + WAIT_S
    while _leads(leader) or _leads(standby):
        assert time.monotonic() < end, "the leader does not step down"
    while frontend.has_message():
        frontend.receive()
    worker.answer(plan, [0], [13])
    assert not frontend.has_message()

    cell.etcd.send_signal(signal.SIGCONT)

    assert _log(cell.leader()[0]) == [1, 2, 3, 11, 12]


_COPY_LIMIT_BYTES = 32 << 10
"""Maximum file size of a standby that cannot complete its copy."""


class _Partial:
    """A standby of a leader with a large journal. Its copy stays partial until `complete`.

    The copy fails at each attempt, because the journal is larger than the standby's maximum file size.
    """

    def __init__(self, stack: ExitStack, leader: Scheduler, folder: Path, *flags: str) -> None:
        frontend = leader.frontend()
        frontend.hello()
        submissions = [
            link_pb2.Submission(
                stream=stream,
                request_id=f"waiting{stream}",
                token_ids=to_column([1, 2, 3]),
                num_prompt_tokens=3,
                max_tokens=4,
                sampling=plan_pb2.SamplingParams(top_p=1).SerializeToString(),
                credit=1000,
                identity=stream.to_bytes(16, "little"),
            )
            for stream in range(1, 1001)
        ]
        frontend.send(link_pb2.FrontendMessage(submissions=submissions))
        begun = leader.until("quire_standby_copies_total", lambda value: value >= 0)
        self.scheduler = stack.enter_context(Scheduler(folder, *flags))
        self._process = psutil.Process(self.scheduler.process.pid)
        self._unlimited = self._process.rlimit(psutil.RLIMIT_FSIZE)
        self._process.rlimit(psutil.RLIMIT_FSIZE, (_COPY_LIMIT_BYTES, self._unlimited[1]))
        # The second copy begins after the first one has failed.
        leader.until("quire_standby_copies_total", lambda value: value >= begun + 2)

    def complete(self) -> None:
        """Let the next copy succeed."""
        self._process.rlimit(psutil.RLIMIT_FSIZE, self._unlimited)


def test_a_standby_with_a_partial_journal_lets_one_with_the_whole_journal_lead(tmp_path: Path) -> None:
    """The leader dies while one standby catches up. That standby then gets the journal of the new leader."""
    with lease_servers.etcd(tmp_path) as (server, _), ExitStack() as stack:
        flags = (f"--leader-lease=etcd://{server}/quire", "--leader-lease-s=20")
        others = [",".join(f"ipc://{tmp_path}/{other}/s" for other in "abc" if other != name) for name in "abc"]
        leader = stack.enter_context(Scheduler(tmp_path / "a", f"--standby-of={others[0]}", *flags))
        number = leader.until("quire_leader_number", lambda value: value > 0)
        whole = stack.enter_context(Scheduler(tmp_path / "b", f"--standby-of={others[1]}", *flags))
        _begin(leader)
        partial = _Partial(stack, leader, tmp_path / "c", f"--standby-of={others[2]}", *flags)
        leader.until("quire_standby_ready", lambda value: value == 1)
        leader.until("quire_standby_lag_bytes", lambda value: value > _COPY_LIMIT_BYTES)
        leader.kill()

        taken = whole.until("quire_leader_number", lambda value: value > 0)

        assert taken == number + 1, "another standby led first"
        assert _log(whole) == [1, 2, 3, 11, 12]
        whole.until("quire_standby_ready", lambda value: value == 0)
        partial.complete()
        whole.until("quire_standby_ready", lambda value: value == 1)
        whole.kill()
        partial.scheduler.until("quire_leader_number", lambda value: value == number + 2)
        assert _log(partial.scheduler) == [1, 2, 3, 11, 12]


def test_a_leader_that_restarts_continues_if_its_standby_has_a_partial_journal(tmp_path: Path) -> None:
    """The standby lets it lead again, and then gets the whole journal."""
    with lease_servers.etcd(tmp_path) as (server, _), ExitStack() as stack:
        flags = (f"--leader-lease=etcd://{server}/quire", "--leader-lease-s=20")
        addresses = [f"ipc://{tmp_path}/{name}/s" for name in "ab"]
        leader = stack.enter_context(Scheduler(tmp_path / "a", f"--standby-of={addresses[1]}", *flags))
        number = leader.until("quire_leader_number", lambda value: value > 0)
        _begin(leader)
        partial = _Partial(stack, leader, tmp_path / "b", f"--standby-of={addresses[0]}", *flags)
        leader.kill()
        leader.close()

        restarted = stack.enter_context(Scheduler(tmp_path / "a", f"--standby-of={addresses[1]}", *flags))

        assert restarted.until("quire_leader_number", lambda value: value > 0) == number + 1
        assert _log(restarted) == [1, 2, 3, 11, 12]
        partial.complete()
        restarted.until("quire_standby_ready", lambda value: value == 1)
        restarted.kill()
        partial.scheduler.until("quire_leader_number", lambda value: value == number + 2)
        assert _log(partial.scheduler) == [1, 2, 3, 11, 12]


@pytest.mark.parametrize(
    ("lease", "reason"),
    [
        ("etcd://", "a server or the name is missing"),
        ("etcd://h:2379", "a server or the name is missing"),
        ("etcd://h:2379/quire?cacert=x", "unknown parameter cacert"),
        ("etcd://h:2379/quire?ca=/nowhere", "No such file"),
        ("kubernetes", "KUBERNETES_SERVICE_HOST is not set, so this is no pod"),
    ],
)
def test_an_invalid_lease_is_refused(lease: str, reason: str) -> None:
    """The message names the setting and the remedy."""
    with pytest.raises(ConfigError, match=rf"leader_lease \(--leader-lease\): .*{reason}.*; use etcd://HOST:PORT/NAME"):
        open_store(lease, "holder", DURATION_S, environ={})


def test_a_lease_in_a_store_needs_replication(tmp_path: Path) -> None:
    """The message names the setting that is missing."""
    failed = subprocess.run(
        [
            *(sys.executable, "-m", "quire_server.cli.main", "scheduler", "--leader-lease=etcd://h:2379/quire"),
            *(f"--standby-address=ipc://{tmp_path}/s", f"--journal={tmp_path}/j"),
        ],
        capture_output=True, timeout=WAIT_S, check=False, text=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert failed.returncode == 1
    assert failed.stderr.endswith("for schedulers that replicate their journal; add --standby-of\n")
