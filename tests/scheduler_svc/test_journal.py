"""The promises of the journal.

After a crash at any byte, the journal's reader knows everything that clients have received, and no more than the writer
knew. The journal's size is bounded. A full disk ends no request.
"""

import errno
import os
import random
import resource
import select
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from records.rules.oracle import expected_output
from scheduler_svc.assembly import open_journal
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import Log
from scheduler_svc.frontend.hub import FrontendHub
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.recovery import replay, to_event
from scheduler_svc.journal.segments import HEADER, read_segment
from scheduler_svc.journal.syncer import Syncer
from shared.columns import from_column, to_column
from shared.config import ConfigError, SchedulerConfig
from shared.folder_lock import FolderInUseError
from shared.request_spec import RequestSpec
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.operations import count_calls

Known = dict[bytes, tuple[list[int], ef.EndReason | None]]
"""By identity: all tokens, and how it ended if it ended well."""
MIB = 1 << 20


def _known(logs: tuple[tuple[float, Log], ...]) -> Known:
    return {
        log.spec.identity: (np.frombuffer(log.tokens, "<i4").tolist(), None if log.end is None else log.end.reason)
        for _, log in logs
    }


def _on_disk(files: list[bytes]) -> Known:
    """What a reader of these segments knows."""
    return _known(to_event(replay([read_segment(data) for data in files]).book, 0).logs)


@dataclass(frozen=True, slots=True)
class Moment:
    """After a commit."""

    size: int
    """Of the newest segment."""
    known: Known
    """What was committed."""
    told: dict[int, list[int]]
    """By stream, what its client has."""


class Written:
    """A running core whose effects reach the journal before its clients."""

    def __init__(self, folder: Path, *, seed: int = 0, max_bytes: int = 64 * MIB, keep_s: float = 300.0) -> None:
        self.now_ms = 1_000_000
        self.journal = Journal(folder, max_bytes=max_bytes, keep_s=keep_s, clock_ms=lambda: self.now_ms)
        self.cluster = Cluster(resume_keep_s=keep_s)
        self.cluster.join(ModelWorker(b"w/1", 512, 16, 8, max_draft_tokens=4 * (seed % 2)))
        self.moments: list[Moment] = []
        self._folder = folder
        self._rng = random.Random(seed)
        self._streams = 0
        self._seen = 0
        self.prompts: dict[bytes, list[int]] = {}
        self.limits: dict[bytes, int] = {}

    def end_turn(self) -> None:
        """Commit the effects of a turn before any client receives them."""
        for effect in self.cluster.effects[self._seen :]:
            self.journal.note(effect)
        self._seen = len(self.cluster.effects)
        self.journal.commit()
        book = self.journal._book
        assert book.num_bytes == sum(entry.size for entry in book)

    def commit(self) -> None:
        """End the turn, and store the current content of the journal and the readers."""
        self.end_turn()
        told = {stream: list(reader.tokens) for stream, reader in self.cluster.readers.items()}
        self.moments.append(Moment(len(self.files()[-1]), _known(to_event(self.journal._book, 0).logs), told))

    def files(self) -> list[bytes]:
        """The segments, oldest first."""
        return [path.read_bytes() for path in sorted(self._folder.glob("*.journal"))]

    def submit(self, *, longest: int = 12) -> bytes:
        """A new request; every fourth is not resumable."""
        self._streams += 1
        identity = b"" if self._streams % 4 == 0 else b"%d" % self._streams
        prompt = [self._rng.randrange(900) for _ in range(self._rng.randrange(1, 6))]
        limit = self._rng.randrange(1, longest)
        stops = {token for token in range(1000) if token % 17 == 0}
        self.cluster.submit(self._streams, prompt, limit, identity=identity, stops=stops)
        self.prompts[identity], self.limits[identity] = prompt, limit
        return identity

    def act(self) -> None:
        """Something happens."""
        cluster, rng = self.cluster, self._rng
        stream = rng.randrange(1, self._streams + 1) if self._streams else 0
        match rng.randrange(10):
            case 0 | 1 | 2:
                self.submit()
            case 3 if stream:
                cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=stream, keep=rng.random() < 0.7))
            case 4 if stream:
                cluster.handle(ev.RequestsDropped(identities=(b"%d" % stream,)))
            case 5 if stream:
                self.resume(b"%d" % stream)
            case 6 if stream and stream in cluster.readers:
                cluster.handle(ev.StopMatched(frontend=FRONTEND, stream=stream, keep_tokens=0))
            case _:
                cluster.plan()
                cluster.answer()

    def resume(self, identity: bytes) -> None:
        """A client comes back for a request and goes on with all that there is."""
        effects = self.cluster.handle(ev.ResumeAsked(frontend=FRONTEND, number=1, identity=identity))
        (answer,) = [effect for effect in effects if isinstance(effect, ef.ResumeAnswered)]
        if answer.log is None or answer.log.end is not None:
            return
        self._streams += 1
        self.submit_log(answer.log, self._streams)

    def submit_log(self, log: Log, stream: int) -> None:
        """Submits a request with the tokens of its log."""
        tokens = np.frombuffer(log.tokens, "<i4").tolist()
        request, count = log.spec, log.spec.num_prompt_tokens
        self.cluster.submit(
            stream,
            tokens[:count],
            request.max_tokens,
            stops=set(from_column(request.stop_token_ids).tolist()),
            identity=request.identity,
            again=True,
            delivered=tuple(tokens[count:]),
        )


@pytest.mark.parametrize("seed", range(2))
def test_a_crash_at_any_byte_loses_nothing_that_a_client_has(tmp_path: Path, seed: int) -> None:
    """Truncated at any byte, the journal contains exactly the state after the last complete commit.

    This is at least what any client had received, because clients receive tokens after the commit.
    """
    written = Written(tmp_path, seed=seed)
    written.commit()
    while len(written.files()[-1]) < 5000:
        for _ in range(written._rng.randrange(1, 4)):
            written.act()
        written.commit()
    (data,) = written.files()
    assert {None, ef.EndReason.LENGTH} <= {end for _, end in written.moments[-1].known.values()}

    position = 0
    for size in range(written.moments[0].size, len(data) + 1):
        while position + 1 < len(written.moments) and written.moments[position + 1].size <= size:
            position += 1
        moment = written.moments[position]
        known = _on_disk([data[:size]])
        assert known == moment.known, f"cut off at byte {size}"
        for stream, tokens in moment.told.items():
            identity, prompt = b"%d" % stream, written.prompts.get(b"%d" % stream)
            if identity in known and prompt is not None:
                assert known[identity][0][: len(prompt) + len(tokens)] == [*prompt, *tokens]
    written.journal.close()


@pytest.mark.parametrize("damage", ["bit", "zeros", "garbage"])
def test_damage_costs_only_the_data_behind_it(tmp_path: Path, damage: str) -> None:
    """A flipped bit, zeros or garbage at the end lose the data there, and nothing before."""
    written = Written(tmp_path)
    for _ in range(30):
        written.act()
        written.commit()
    (data,) = written.files()
    previous, last = [moment for moment in written.moments if moment.size < len(data)][-1], written.moments[-1]
    middle = (previous.size + len(data)) // 2
    match damage:
        case "bit":
            assert _on_disk([data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]]) == previous.known
        case "zeros":
            assert _on_disk([data + bytes(4096)]) == last.known
        case "garbage":
            assert _on_disk([data + random.Random(1).randbytes(999)]) == last.known


def test_a_new_core_goes_on_where_the_last_one_was_struck(tmp_path: Path) -> None:
    """Resumed from the journal after any crash, a request has the output of an undisturbed run.

    This holds for all states of a request, and across several crashes.
    """
    rng = random.Random(5)
    written = Written(tmp_path, seed=7)
    identities = [identity for identity in (written.submit(longest=60) for _ in range(12)) if identity]
    prompts, limits = dict(written.prompts), dict(written.limits)
    written.commit()
    for life in range(6):
        for _ in range(rng.randrange(4, 9)):
            written.cluster.plan()
            written.cluster.answer()
            written.commit()
        tokens = dict(_on_disk(written.files()))
        for path in sorted(tmp_path.glob("*.journal"))[-1:]:
            path.write_bytes(path.read_bytes() + b"torn"[: rng.randrange(5)])
        written.journal._folder.close()  # The kernel also releases the lock when a process dies.
        written = Written(tmp_path, seed=life)
        written.cluster.handle(written.journal.restored)
        assert _known(written.journal.restored.logs) == tokens
        for stream, (_, log) in enumerate(written.journal.restored.logs, 1000 * (life + 1)):
            if log.end is None:
                written.submit_log(log, stream)
        written.commit()
    written.cluster.run()
    written.commit()

    known = _on_disk(written.files())
    stops = {token for token in range(1000) if token % 17 == 0}
    for identity in identities:
        prompt = prompts[identity]
        assert known[identity][0] == [*prompt, *expected_output(prompt, limits[identity], stops)]
        assert known[identity][1] in (ef.EndReason.LENGTH, ef.EndReason.STOP)
    written.journal.close()


def test_the_journal_stays_within_its_bounds(tmp_path: Path) -> None:
    """However much is written, the folder stays small, and says as much as before it was tidied up."""
    written = Written(tmp_path, max_bytes=40_000)
    largest = 0
    for _ in range(12):
        for _ in range(100):
            written.act()
            written.cluster.handle(ev.RequestsDropped(identities=(b"%d" % (written._streams - 40),)))
            written.end_turn()
            largest = max(largest, written.journal.num_bytes)
        written.commit()
        assert written.journal.num_bytes == sum(map(len, written.files()))
        assert _on_disk(written.files()) == written.moments[-1].known

    assert written.journal.stats.forgotten == 0
    assert written.journal.written > 2 * 40_000
    assert largest < 50_000
    for identity in written.moments[-1].known:
        assert written.cluster.core.knows(identity)
    written.journal.close()


def test_a_full_journal_drops_the_oldest_requests(tmp_path: Path) -> None:
    """Requests beyond the journal's size are no longer covered, which is counted."""
    written = Written(tmp_path, max_bytes=20_000)
    for _ in range(400):
        written.submit()
        written.cluster.plan()
        written.cluster.answer()
        written.end_turn()

    assert written.journal.stats.forgotten > 0
    assert sum(map(len, written.files())) < 30_000
    known = _on_disk(written.files())
    assert known
    assert min(map(int, known)) > 100
    assert b"399" in known
    written.journal.close()


def test_a_commit_costs_what_it_writes(tmp_path: Path) -> None:
    """Beyond half of its space the journal looks for waste in every turn, at a cost independent of the requests."""

    def cost(num_requests: int) -> int:
        written = Written(tmp_path / str(num_requests), max_bytes=num_requests * 800)
        for stream in range(1, num_requests + 1):
            written.cluster.submit(stream, list(range(100)), 9, identity=b"%d" % stream)
        written.end_turn()
        assert written.journal.num_bytes > num_requests * 800 // 2
        written.cluster.plan()
        written.cluster.answer()
        written.journal.commit()
        for effect in written.cluster.effects[written._seen :]:
            written.journal.note(effect)
        calls = count_calls(written.journal.commit)
        written.journal.close()
        return calls

    assert cost(800) == cost(20)


def test_nothing_lies_there_for_long(tmp_path: Path) -> None:
    """What is kept no longer is on no disk after three times as long, however little is written."""
    written = Written(tmp_path, keep_s=10.0)
    prompt = list(range(100, 140))
    written.cluster.submit(5, prompt, 3, identity=b"secret")
    written.cluster.run()
    written.commit()
    secret = np.array(prompt, "<i4").tobytes()
    assert any(secret in data for data in written.files())

    for _ in range(40):
        written.now_ms += 1000
        written.cluster.now += 1
        written.cluster.handle(ev.TimePassed())
        written.commit()

    assert not any(secret in data for data in written.files())
    assert len(written.files()) == 1
    written.journal.close()


def test_an_expired_log_is_not_restored(tmp_path: Path) -> None:
    """The time between two schedulers counts towards the time for which logs are kept."""
    written = Written(tmp_path, keep_s=10.0)
    written.submit()
    written.commit()
    written.journal.close()

    late = Journal(tmp_path, max_bytes=MIB, keep_s=10.0, clock_ms=lambda: 1_000_000 + 11_000)
    cluster = Cluster(resume_keep_s=10.0)
    cluster.handle(late.restored)
    cluster.handle(ev.TimePassed())
    for effect in cluster.effects:
        late.note(effect)
    late.commit()

    assert not cluster.core.knows(b"1")
    assert len(late) == 0
    late.close()


def test_a_disk_that_takes_nothing_ends_nothing(tmp_path: Path) -> None:
    """Failed writes, also within a frame, are counted; after the disk recovers, the journal is complete again."""
    written = Written(tmp_path)
    for _ in range(20):
        written.act()
        written.commit()
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(written.files()[-1]) + 10, limits[1]))
        while written.journal.covers:
            written.act()
            written.commit()
        written.submit()
        written.commit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert written.journal.stats.failures == 1
    assert written.journal.durable == written.journal.written

    written.journal._retry_at = 0.0
    written.submit()
    written.commit()
    assert written.journal.covers
    written.submit()
    written.commit()
    assert _on_disk(written.files()) == written.moments[-1].known
    written.journal.close()


def test_a_disk_that_stays_full_for_several_retries_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry for which there is no room leaves no file, so a later one succeeds."""
    written = Written(tmp_path)
    written.submit()
    written.commit()
    before = written.files()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            written.submit()
            written.journal._retry_at = 0.0
            written.commit()
    assert written.journal.stats.failures == 3
    assert written.files() == before

    written.journal._retry_at = 0.0
    written.commit()
    assert written.journal.covers
    assert _on_disk(written.files()) == written.moments[-1].known
    written.journal.close()


def test_a_segment_that_cannot_be_deleted_ends_nothing(tmp_path: Path) -> None:
    """A failed deletion is counted; once it succeeds, the journal is one segment again."""
    Journal(tmp_path, max_bytes=MIB, keep_s=300).close()
    written = Written(tmp_path)
    (tmp_path / "000000000001.journal").unlink()
    (tmp_path / "000000000001.journal").mkdir()
    written.submit()
    written.end_turn()
    assert written.journal.stats.failures == 1

    (tmp_path / "000000000001.journal").rmdir()
    written.journal._retry_at = 0.0
    for _ in range(3):
        written.submit()
        written.commit()
    assert len(written.files()) == 1
    assert _on_disk(written.files()) == written.moments[-1].known
    written.journal.close()


def test_one_scheduler_at_a_time_writes_a_journal(tmp_path: Path) -> None:
    """A second scheduler is refused with the folder's name; when the first one exits, it is accepted."""
    first = Journal(tmp_path, max_bytes=MIB, keep_s=1)
    with pytest.raises(FolderInUseError, match=str(tmp_path)):
        Journal(tmp_path, max_bytes=MIB, keep_s=1)
    first.close()
    Journal(tmp_path, max_bytes=MIB, keep_s=1).close()


def test_a_journal_of_a_newer_release_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """After a rollback, one line names the file and the remedies. With another folder, the scheduler starts."""
    written = Written(tmp_path)
    written.act()
    written.commit()
    written.journal.close()
    (path,) = tmp_path.glob("*.journal")
    newer = HEADER[:-1] + bytes([HEADER[-1] + 1])
    path.write_bytes(newer + path.read_bytes()[len(HEADER) :])
    content = path.read_bytes()

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^journal \(--journal\): .*l was written by a newer release; start"):
            open_journal(SchedulerConfig(journal=str(tmp_path)))
    assert [each.read_bytes() for each in tmp_path.glob("*.journal")] == [content]
    other = open_journal(SchedulerConfig(journal=str(tmp_path / "other")))
    assert other is not None
    other.close()


def test_with_fsync_step_front_ends_get_tokens_after_the_disk_write(tmp_path: Path) -> None:
    """A commit is durable only after the disk write, which a descriptor signals; then nothing is held back."""
    journal = Journal(tmp_path, max_bytes=MIB, keep_s=1, fsync="step")
    spec = RequestSpec(request_id="r", num_prompt_tokens=1, max_tokens=1, identity=b"i")
    journal.note(ef.LogBegun(frontend=FRONTEND, stream=1, spec=spec, tokens=to_column([1]), scores=()))
    journal.commit()
    while journal.durable < journal.written:
        assert select.select(journal.descriptors, [], [], 30)[0], "the disk is never told to have it"
        journal.commit()
    assert journal.durable == journal.written
    journal.close()
    assert list(_on_disk([path.read_bytes() for path in tmp_path.glob("*.journal")])) == [b"i"]


def test_a_sync_that_fails_makes_nothing_durable(tmp_path: Path) -> None:
    """From a failure on nothing counts as on the disk, whatever a later sync says, until a new file is begun."""
    syncer = Syncer(lambda: None, interval_s=0.0)

    def sync(descriptor: int, position: int) -> None:
        syncer.acknowledge()
        syncer.want(descriptor, position)
        assert select.select([syncer.woken], [], [], 30)[0]

    reader, no_file = os.pipe()
    good = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in "abc"]
    sync(good[0], 10)
    assert syncer.synced == 10
    sync(no_file, 20)
    assert syncer.failure is not None
    sync(good[1], 30)
    assert syncer.synced == 10

    syncer.start_over()
    sync(good[2], 40)
    assert syncer.synced == 40
    assert not syncer.failure
    syncer.close()
    os.close(good[2])
    os.close(reader)


def test_frames_wait_for_the_journal(tmp_path: Path) -> None:
    """A front end is sent nothing of a turn before the journal is durable up to that turn."""
    import zmq

    from shared.sockets import connect_dealer

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/f"
    hub = FrontendHub(context, address, incarnation=1, lease_s=10)
    peer = connect_dealer(context, address, identity=b"f/1", max_message=MIB)
    peer.send(b"hello")
    assert hub.socket.poll(10_000)
    hub.socket.recv_multipart()
    hub.heard(b"f/1", 0.0, version=1)

    hub.outgoing(b"f/1").set_snapshot(1, [])
    assert not hub.flush(100, 90)
    hub.outgoing(b"f/1").set_snapshot(2, [])
    assert not hub.flush(110, 99)
    assert not peer.poll(50)
    assert not hub.flush(110, 100)
    assert peer.poll(10_000)
    peer.recv()
    assert not peer.poll(50)
    assert not hub.flush(110, 110)
    assert peer.poll(10_000)
    peer.close()
    hub.socket.close()
    context.destroy(linger=0)
