"""The simulator's checks bite: every bug planted into the core is found, by a check that is about it."""

import pytest

from checks.planted import BUGS, PlantedBug
from checks.sim.coverage import Coverage
from checks.sim.scenario import draw
from checks.sim.simulation import Simulation

MOST_SEEDS = 80
STEPS = 500


@pytest.mark.drawn(50)
@pytest.mark.parametrize("bug", [bug for bug in BUGS if not bug.unseen], ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the core makes one of its own checks fail within `MOST_SEEDS` short simulations."""
    bug.plant(monkeypatch)
    found: list[str] = []
    for seed in range(MOST_SEEDS):
        failure = Simulation(bug.aim(draw(seed)), Coverage()).run(STEPS).failure
        if failure is not None:
            found.append(failure.check)
            if failure.check in bug.found_by:
                return
    pytest.fail(f"{bug.plant.__doc__} Found were only {found}.")


def test_at_least_160_bugs_are_planted() -> None:
    """At least 160 bugs are planted, each once."""
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 160


AIMED = list({bug.aim: bug for bug in BUGS if bug.aim(draw(0)) != draw(0)}.values())
"""One bug for each adaptation."""


@pytest.mark.drawn(15)
@pytest.mark.parametrize("bug", AIMED, ids=lambda bug: bug.name)
def test_without_the_bug_its_worlds_are_sound(bug: PlantedBug) -> None:
    """The same simulations without the bug show no failure, so it is the bug that is found."""
    for seed in range(4):
        failure = Simulation(bug.aim(draw(seed)), Coverage()).run(STEPS).failure
        assert failure is None, f"seed {seed}: {failure.check}: {failure.detail}"
