"""Flight recorder: replays are bit for bit, damage is found, and no text is on the disk."""

import dataclasses
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from checks.sim.aims import both, with_checkpoints, with_few_words, with_host_states, with_windows
from checks.sim.scenario import draw
from protos.quire.plan.v1 import plan_pb2
from protos.quire.record.v1 import record_pb2 as pb
from quire_server.cli.main import main
from records.decoding import Decoder
from records.reader import Segment, read
from records.replay import RecordedFacts, entries, replay
from records.rules.model_worker import ModelWorker
from records.rules.oracle import grammar_key
from records.values import Entry, PlanAsked, digest
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.records import RequestEnded
from scheduler_svc.recorder.encoding import Encoder
from scheduler_svc.recorder.segments import UnreadableRecordError
from scheduler_svc.recorder.snapshot import dump, load
from scheduler_svc.recorder.tags import Tagger
from scheduler_svc.recorder.tape import Cut, Handled, Planned, RecordedScheduler, Tape
from shared.request_spec import RequestSpec
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.many_steps import record_steps
from tests.scheduler_svc.recording import record, record_scenario

SEEDS = [7, 9, 10, 12]
"""Radix cache, grammars, kept requests, restarts of the core, several workers, swapping."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_replay_makes_every_plan_again(seed: int, with_tokens: bool, tmp_path: Path) -> None:
    """Every plan and every end of a simulated run with faults is equal to the recorded one."""
    result, _ = record(tmp_path, seed, 600, with_tokens=with_tokens)

    outcome = replay(read(tmp_path))

    assert result.failure is None
    assert outcome.difference is None
    assert outcome.plans == result.num_plans
    assert outcome.ends > 10


@pytest.mark.parametrize("seed", SEEDS)
def test_a_replay_can_start_at_any_segment(seed: int, tmp_path: Path) -> None:
    """Each segment alone replays from its snapshot; together they hold every plan."""
    result, _ = record(tmp_path, seed, 600, cut_every=200)

    outcomes = [replay([segment]) for segment in read(tmp_path)]

    assert len(outcomes) > 3
    assert [outcome.difference for outcome in outcomes if outcome.difference is not None] == []
    assert sum(outcome.plans for outcome in outcomes) == result.num_plans


@pytest.mark.parametrize("seed", [1, 3])
def test_states_and_checkpoints_replay(seed: int, tmp_path: Path) -> None:
    """Each segment of a run with checkpoints of recurrent states replays from its snapshot, without token ids."""
    scenario = both(with_checkpoints(12), with_host_states(4))(draw(seed))
    result, _ = record_scenario(tmp_path, scenario, 400, cut_every=150)

    outcomes = [replay([segment]) for segment in read(tmp_path)]

    assert result.failure is None
    assert [outcome.difference for outcome in outcomes if outcome.difference is not None] == []
    assert sum(outcome.plans for outcome in outcomes) == result.num_plans
    plans = [entry.what.plan for entry in entries(read(tmp_path)) if isinstance(entry.what, PlanAsked)]
    assert any(plan.save_rows for plan in plans if plan is not None)
    assert any(plan.kept_places for plan in plans if plan is not None)
    assert any(each.checkpoint is not None for plan in plans if plan is not None for each in plan.admissions)


@pytest.mark.parametrize("seed", [1, 3])
def test_tables_for_windows_replay(seed: int, tmp_path: Path) -> None:
    """Each segment of a run with windows replays from its snapshot, without token ids, and has the rows' tables."""
    scenario = both(with_few_words, with_windows(7))(draw(seed))
    result, _ = record_scenario(tmp_path, scenario, 400, cut_every=150)

    outcomes = [replay([segment]) for segment in read(tmp_path)]

    assert result.failure is None
    assert [outcome.difference for outcome in outcomes if outcome.difference is not None] == []
    assert sum(outcome.plans for outcome in outcomes) == result.num_plans
    plans = [entry.what.plan for entry in entries(read(tmp_path)) if isinstance(entry.what, PlanAsked)]
    admissions = [each for plan in plans if plan is not None for each in plan.admissions]
    assert all(each.window_tables and each.window_period for each in admissions)
    assert any(each.window_first for each in admissions)


def test_a_planted_difference_is_found_and_named(tmp_path: Path) -> None:
    """A replay of a record with one changed chunk stops at that plan and reports the difference."""
    record(tmp_path, 7, 600)
    (segment, *_) = read(tmp_path)
    found = list(segment)
    plans = [
        (each, each.what.plan) for each in found if isinstance(each.what, PlanAsked) and each.what.plan is not None
    ]
    changed, plan = next((entry, plan) for entry, plan in plans[10:] if plan.chunk_lengths)
    longer = [each + 1 for each in plan.chunk_lengths]
    changed.what = PlanAsked(worker=plan.worker, plan=dataclasses.replace(plan, chunk_lengths=longer))

    outcome = replay([_Given(segment.path, segment.opening, found=found)])

    assert outcome.difference is not None
    assert outcome.difference.index == changed.index
    assert "chunk_lengths: recorded" in outcome.difference.what
    (worker_id,) = {
        each.what.worker_id
        for each in found
        if isinstance(each.what, ev.WorkerHello) and each.what.worker == plan.worker and each.index < changed.index
    }
    assert outcome.difference.what.startswith(f"step {plan.step} of {worker_id}: ")


@pytest.mark.parametrize("name", ["completion_tokens", "cached_prompt_tokens", "retry_ms", "queued_s"])
def test_a_planted_difference_of_an_end_names_the_request(name: str, tmp_path: Path) -> None:
    """A replay compares tokens, retry delays and times of each end, and names the request."""
    record(tmp_path, 7, 600)
    (segment, *_) = read(tmp_path)
    found = list(segment)
    ids = {
        (each.what.frontend, each.what.stream): each.what.spec.request_id
        for each in found
        if isinstance(each.what, ev.RequestArrived)
    }
    changed = [each for each in found if isinstance(each.what, RequestEnded)][5]
    assert isinstance(changed.what, RequestEnded)
    changed.what = dataclasses.replace(changed.what, **{name: getattr(changed.what, name) + 1})

    outcome = replay([_Given(segment.path, segment.opening, found=found)])

    assert outcome.difference is not None
    assert outcome.difference.index == changed.index
    assert f"the end of {ids[changed.what.frontend, changed.what.stream]}: " in outcome.difference.what


@dataclasses.dataclass(slots=True)
class _Given(Segment):
    """A segment with other entries."""

    found: list[Entry] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.found)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_a_million_steps_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record of a million steps, with lost workers and preemptions, replays bit for bit."""
    began = time.monotonic()
    steps = record_steps(tmp_path, 1_000_000)
    recorded = time.monotonic()
    outcome = replay(read(tmp_path))
    with capsys.disabled():
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        print(
            f"\n{steps} steps, {outcome.plans} plans, {outcome.ends} ends, {size} bytes:"
            f" recorded in {recorded - began:.0f} s, replayed in {time.monotonic() - recorded:.0f} s"
        )

    assert outcome.difference is None
    assert outcome.steps >= steps >= 1_000_000


@pytest.mark.release
@pytest.mark.parametrize("seed", range(100, 120))
def test_chaos_runs_replay(seed: int, tmp_path: Path) -> None:
    """Longer simulated runs with faults replay bit for bit."""
    result, _ = record(tmp_path, seed, 5000, cut_every=5000)

    outcome = replay(read(tmp_path))

    assert result.failure is None
    assert outcome.difference is None
    assert outcome.plans == result.num_plans


def test_a_damaged_segment_ends_at_the_damage(tmp_path: Path) -> None:
    """A torn end, a flipped byte and a truncated file lose everything that follows; everything before replays."""
    record(tmp_path, 7, 600)
    path = read(tmp_path)[0].path
    data = path.read_bytes()
    whole = len(list(entries(read(path))))
    for damaged in (
        data[:-3],
        data[: len(data) // 2],
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
    ):
        path.write_bytes(damaged)
        (segment,) = read(path)

        outcome = replay([segment])

        assert outcome.difference is None
        assert 0 < outcome.entries < whole
        assert segment.left_out
        (missing,) = outcome.missing
        assert missing.what.endswith("bytes are damaged or incomplete")


def test_a_replay_names_what_is_missing_and_has_an_exit_code_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for a complete record, 3 for one that lacks a segment or part of one, 1 for one with a different plan."""
    record(tmp_path, 7, 400, cut_every=120)
    second, third = sorted(each.path for each in read(tmp_path))[1:3]
    openings = [each.opening.first_index for each in read(tmp_path)]

    def run() -> tuple[int, list[str]]:
        code = main(["replay", str(tmp_path)])
        return code, capsys.readouterr().out.splitlines()

    code, lines = run()
    assert (code, len(lines)) == (0, 2)
    assert lines[-1].startswith("identical plans=")

    data = second.read_bytes()
    second.write_bytes(data[:-3])
    code, lines = run()
    assert code == 3
    assert "bytes are damaged or incomplete: entries" in lines[0]
    assert f"to {openings[2] - 1}" in lines[0]
    assert lines[1].startswith("equal as far as the record goes: ")

    second.unlink()
    third.unlink()
    code, lines = run()
    assert code == 3
    assert lines[0].endswith(f": entries {openings[1]} to {openings[3] - 1} are in no segment")


def test_a_record_holds_no_tokens_unless_it_should(tmp_path: Path) -> None:
    """Without record_tokens all token columns are zeros; with it they contain the tokens."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    record(tmp_path / "with", 7, 300, with_tokens=True)
    record(tmp_path / "without", 7, 300)

    def tokens(name: str) -> int:
        found = (getattr(entry.what, "token_ids", None) for entry in entries(read(tmp_path / name)))
        return sum(int(each.any()) for each in found if each is not None)

    assert tokens("with") > 10
    assert tokens("without") == 0


def test_entries_are_the_calls_of_the_core() -> None:
    """A reader finds every event, plan and timing, with the time of its call, in call order."""
    tape, cluster = Tape(), Cluster()
    cluster.core = RecordedScheduler(CoreConfig(), 1, tape)
    cluster.handle(ev.FrontendJoined(frontend=FRONTEND))
    worker = ModelWorker(b"w/1", 64, 4, 8)
    cluster.join(worker)
    cluster.submit(1, [1, 2, 3], 50)
    for step in range(20):
        cluster.plan()
        tape.timings = plan_pb2.StepTimings(received_unix_ns=step * 10**9, forward_ns=step * 1000)
        cluster.answer()
    encoder, decoder = Encoder(Tagger(), with_tokens=False), Decoder()
    opening = pb.Batch(opening=encoder.begin(0.0))
    encoder.encode([item for item in tape.items if not isinstance(item, Cut)])
    batch = encoder.take()
    decoder.opening(opening)

    found = list(decoder.entries(batch))

    calls = [item for item in tape.items if isinstance(item, Handled | Planned)]
    made = [entry for entry in found if isinstance(entry.what, PlanAsked | ev.Event)]
    assert [entry.time for entry in made] == [call.now for call in calls]
    for entry, call in zip(made, calls, strict=True):
        if isinstance(call, Planned):
            assert isinstance(entry.what, PlanAsked)
            assert entry.what.plan == (None if call.plan is None else digest(call.plan))
        else:
            assert type(entry.what) is type(call.event)
            if call.timings is not None:
                assert entry.timings is not None
                assert entry.timings.forward_us == call.timings.forward_ns // 1000
                assert entry.timings.received_unix_us == call.timings.received_unix_ns // 1000


def test_a_segment_without_a_whole_header_is_left_out(tmp_path: Path) -> None:
    """A folder is readable even if a segment ends within its header; another kind of file is not a record."""
    record(tmp_path, 7, 100)
    (segment,) = read(tmp_path)
    header = segment.path.read_bytes()[:8]
    (tmp_path / "000000000002.record").write_bytes(b"")
    (tmp_path / "000000000003.record").write_bytes(header[:5])

    assert [each.path for each in read(tmp_path)] == [segment.path]
    (tmp_path / "note").write_bytes(b"text")
    with pytest.raises(UnreadableRecordError):
        read(tmp_path / "note")


def test_a_segment_that_is_deleted_while_it_is_read_is_skipped(tmp_path: Path) -> None:
    """The ring may delete segments in its folder at any time; an explicitly named file must exist."""
    record(tmp_path, 7, 600, cut_every=200)
    found, (named,) = read(tmp_path), read(tmp_path / "000000000001.record")
    whole = [len(list(segment)) for segment in found]
    found[0].path.unlink()

    assert len(list(entries(found))) == sum(whole[1:])
    with pytest.raises(FileNotFoundError):
        list(named)


def test_a_snapshot_has_the_keys_of_grammars_that_have_just_arrived(tmp_path: Path) -> None:
    """The key of a grammar fits its tag in a snapshot also if the recorder's thread has not seen the grammar.

    This holds for a live request, and for a kept log whose grammar a worker has compiled.
    """
    cluster = Cluster()
    worker = ModelWorker(b"w/1", 64, 4, 8)
    cluster.join(worker)
    cluster.submit(1, [1, 2, 3], 50, grammar=b"kept grammar", identity=b"i")
    cluster.plan()
    cluster.handle(ev.GrammarReported(worker=worker.peer, epoch=worker.epoch, key=grammar_key(b"kept grammar")))
    cluster.handle(ev.RequestCancelled(frontend=FRONTEND, stream=1, keep=True))
    cluster.submit(2, [1, 2, 3], 50, grammar=b"live grammar")

    core = load(dump(cluster.core, Tagger(), with_tokens=False), RecordedFacts())

    (live,) = core._requests
    ((_, log),) = core._requests.identified._kept._logs.values()
    (loaded,) = core._fleet
    assert live.grammar_key == hashlib.sha256(live.spec.grammar).digest()
    assert loaded.grammars.is_ready(hashlib.sha256(log.spec.grammar).digest())


def test_a_snapshot_keeps_concurrent_turns_of_different_sessions_apart() -> None:
    """Names of equal lengths have different tags wherever the core holds them."""
    cluster = Cluster()
    cluster.join(ModelWorker(b"w/1", 64, 4, 8))
    for stream, name in enumerate((b"aa", b"aa", b"bb", b"bb"), start=1):
        cluster.submit(stream, [*range(1, 20 + stream)], 30, session=name)
        cluster.plan()
        cluster.answer()

    core = load(dump(cluster.core, Tagger(), with_tokens=False), RecordedFacts())

    core.validate()
    sessions = core._requests.sessions
    assert sessions is not None
    assert sorted(sessions._branches) == sorted(sessions._named)


def test_short_scopes_and_identities_keep_their_own_tags() -> None:
    """No tag is truncated to the size of a short value, which would merge two tenants or two requests."""
    cluster = Cluster()
    for number in range(256):
        cluster.submit(number, [1, 2, 3], 50, salt=bytes([number]), identity=bytes([number]))

    core = load(dump(cluster.core, Tagger(), with_tokens=False), RecordedFacts())

    assert len({request.spec.cache_scope for request in core._requests}) == 256
    assert len({request.spec.identity for request in core._requests}) == 256


def test_the_encoder_keeps_what_a_segment_begins_with(tmp_path: Path) -> None:
    """A segment opens with the requests that the core has, as first submitted, and without tokens and block keys."""
    tape = Tape()
    core = RecordedScheduler(CoreConfig(), 1, tape)
    encoder = Encoder(Tagger(), with_tokens=True)

    def arrive(frontend: bytes, stream: int, request_id: str, now: float) -> None:
        spec = RequestSpec(request_id, num_prompt_tokens=5, max_tokens=9)
        tokens = np.arange(6, dtype=np.int32)
        core.handle(
            ev.RequestArrived(
                frontend=frontend,
                stream=stream,
                spec=spec,
                token_ids=tokens,
                credit=1 << 20,
                block_keys=bytes(64),
                block_size=4,
            ),
            now,
        )

    arrive(b"stranger", 1, "unknown", 1.0)
    core.handle(ev.FrontendJoined(frontend=FRONTEND), 2.0)
    arrive(FRONTEND, 2, "first", 3.0)
    arrive(FRONTEND, 2, "second", 4.0)
    encoder.encode([item for item in tape.items if not isinstance(item, Cut)])
    written = encoder.take()
    opening = encoder.begin(5.0)
    peers = encoder.take().peers

    (live,) = opening.live
    assert (peers[live.frontend], live.stream, live.spec.request_id, live.arrival) == (FRONTEND, 2, "first", 3.0)
    assert live.num_tokens == 6
    assert not live.tokens
    assert not live.block_keys
    arrivals = [entry.arrived for entry in written.entries if entry.WhichOneof("what") == "arrived"]
    assert [each.spec.request_id for each in arrivals] == ["unknown", "first", "second"]
    assert all(each.tokens and each.block_keys and not each.arrival for each in arrivals)
