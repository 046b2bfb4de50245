"""Flight recorder: replays are bit for bit, damage is found, and no text is on the disk."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.recorder.reader import Segment, read
from scheduler_svc.recorder.replay import entries, replay
from scheduler_svc.recorder.values import Entry, PlanAsked
from tests.scheduler_svc.many_steps import record_steps
from tests.scheduler_svc.recording import record

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


def test_a_planted_difference_is_found_and_named(tmp_path: Path) -> None:
    """A replay of a record with one changed chunk stops at that plan and says what differs."""
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


@dataclasses.dataclass(slots=True)
class _Given(Segment):
    """A segment with other entries."""

    found: list[Entry] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.found)


@pytest.mark.release
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
    """A torn tail, a flipped byte and a cut file lose what follows, and what precedes replays."""
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


def test_a_record_holds_no_tokens_unless_it_should(tmp_path: Path) -> None:
    """Without record_tokens all token columns are zeros; with it they are there."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    record(tmp_path / "with", 7, 300, with_tokens=True)
    record(tmp_path / "without", 7, 300)

    def tokens(name: str) -> int:
        found = (getattr(entry.what, "token_ids", None) for entry in entries(read(tmp_path / name)))
        return sum(int(each.any()) for each in found if each is not None)

    assert tokens("with") > 10
    assert tokens("without") == 0
