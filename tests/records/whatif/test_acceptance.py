"""Draft acceptance: recorded outcomes repeat at their positions, and others follow the recorded frequencies."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from records.whatif.acceptance import Acceptance, Drafting, History, Outcome, learn

A, R, M = Outcome.ACCEPTED, Outcome.REJECTED, Outcome.MISSING


def _learned(*histories: History) -> Acceptance:
    found = learn(histories)
    assert found is not None
    return found


def test_the_steps_of_a_record_are_repeated() -> None:
    """A request that verifies drafts at the same positions verifies and accepts as many."""
    steps = [(5, 4, 4, 4), (10, 4, 4, 1), (12, 4, 2, 2), (15, 1, 1, 1), (17, 8, 0, 0)]
    history = History()
    for index, most, verified, accepted in steps:
        history.note(index, most, verified, accepted)

    drafting = Drafting(_learned(history), [bytes(history.outcomes)], random.Random(1))

    # In the second step, all permitted drafts were verified, including those after the rejected draft.
    assert [drafting.verify(0, index, most) for index, most, _, _ in steps] == [(4, 4), (4, 1), (2, 2), (1, 1), (0, 0)]


def test_a_smaller_limit_takes_the_same_drafts_in_more_steps() -> None:
    """Places keep their outcome when steps begin elsewhere."""
    history = History()
    history.note(0, 8, 8, 6)
    drafting = Drafting(_learned(history), [bytes(history.outcomes)], random.Random(1))

    assert drafting.verify(0, 0, 2) == (2, 2)
    assert drafting.verify(0, 3, 2) == (2, 2)
    assert drafting.verify(0, 6, 2) == (2, 0)


def test_unknown_outcomes_keep_the_runs_of_the_record() -> None:
    """Accepted and rejected drafts come in runs as long as in the record, and are as frequent."""
    rng = random.Random(3)
    history = History()
    index = 0
    for _ in range(2000):
        for _ in range(rng.randrange(1, 20)):
            history.note(index, 1, 1, 1)
            index += 1
        for _ in range(rng.randrange(1, 10)):
            history.note(index, 1, 1, 0)
            index += 1
    recorded = list(history.outcomes)

    drafting = Drafting(_learned(history), [b""], random.Random(5))
    drawn = [A if drafting.verify(0, at, 1) == (1, 1) else R for at in range(20_000)]

    assert M not in recorded
    assert drawn.count(A) / len(drawn) == pytest.approx(recorded.count(A) / len(recorded), abs=0.03)
    assert _changes(drawn) / len(drawn) == pytest.approx(_changes(recorded) / len(recorded), rel=0.1)


def _changes(outcomes: Sequence[int]) -> int:
    return sum(a != b for a, b in pairwise(outcomes))


def test_nothing_is_learned_without_drafts() -> None:
    """Requests that were never allowed a draft teach nothing; a worker without proposals does."""
    asked = History()
    asked.note(0, 4, 0, 0)

    assert learn([History(), History()]) is None
    assert _learned(History(), asked).positions == 1
