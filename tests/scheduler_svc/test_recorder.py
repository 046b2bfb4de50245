"""Flight recorder: replays are bit for bit, damage is found, and no text is on the disk."""

import dataclasses
from pathlib import Path

import pytest

from scheduler_svc.recorder.reader import read
from scheduler_svc.recorder.replay import entries, replay
from scheduler_svc.recorder.values import PlanAsked
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
    result, _ = record(tmp_path, seed, 600, cut_every=400)

    outcomes = [replay([segment]) for segment in read(tmp_path)]

    assert len(outcomes) > 3
    assert [outcome.difference for outcome in outcomes if outcome.difference is not None] == []
    assert sum(outcome.plans for outcome in outcomes) == result.num_plans


def test_a_planted_difference_is_found_and_named(tmp_path: Path) -> None:
    """A replay of a record with one changed chunk stops at that plan and says what differs."""
    record(tmp_path, 7, 600)
    (segment, *_) = read(tmp_path)
    found = list(segment)
    planned = [each for each in found if isinstance(each.what, PlanAsked) and each.what.plan is not None]
    changed = next(each for each in planned[10:] if each.what.plan.chunk_lengths)  # type: ignore[union-attr]
    plan = changed.what.plan  # type: ignore[union-attr]
    changed.what = PlanAsked(
        worker=plan.worker,  # type: ignore[union-attr]
        plan=dataclasses.replace(plan, chunk_lengths=[each + 1 for each in plan.chunk_lengths]),  # type: ignore[union-attr,type-var]
    )

    outcome = replay([_Given(segment, found)])  # type: ignore[list-item]

    assert outcome.difference is not None
    assert outcome.difference.index == changed.index
    assert "chunk_lengths: recorded" in outcome.difference.what


class _Given:
    """A segment with other entries."""

    def __init__(self, segment, found) -> None:  # type: ignore[no-untyped-def]
        self.opening, self.snapshot, self.left_out = segment.opening, segment.snapshot, 0
        self._found = found

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._found)


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
