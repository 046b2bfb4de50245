"""Print a table of the planted bugs: the first random simulation that finds each bug, the time, and the check.

`python -m checks.planted [NAME …]` tries the named bugs, or all bugs. Worlds are drawn from consecutive seeds as in
`quire sim`, and are not adapted to the bug.
"""

import sys
import time

import pytest

from checks.planted import BUGS, PlantedBug
from checks.sim.aims import draw_world
from checks.sim.coverage import Coverage
from checks.sim.simulation import Simulation

MOST_S = 30.0
"""CPU time limit per bug, in seconds."""
STEPS = 1000


def main(names: list[str]) -> int:
    """Print the table; return 1 if a bug is not found."""
    print("| bug | first seed | events | CPU s | found by |")
    print("|---|---|---|---|---|")
    missed = 0
    for bug in BUGS:
        if not names or bug.name in names:
            row = f"not found | | | {bug.unseen}" if bug.unseen else _first_find(bug)
            missed += row is None
            print(f"| `{bug.name}`: {_what(bug)} | {row or 'not found | | |'} |", flush=True)
    return min(missed, 1)


def _what(bug: PlantedBug) -> str:
    """Return the bug's docstring as part of a sentence."""
    text = " ".join((bug.plant.__doc__ or "").split())
    return text[:1].lower() + text[1:].rstrip(".")


def _first_find(bug: PlantedBug) -> str | None:
    """Return the table cells for the first seed whose failure matches the bug. CPU time counts all seeds up to it."""
    started = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        seed = -1
        while time.process_time() - started < MOST_S:
            seed += 1
            failure = Simulation(draw_world(seed), Coverage()).run(STEPS).failure
            if failure is not None and failure.check in bug.found_by:
                taken = time.process_time() - started
                return f"{seed} | {failure.num_events} | {taken:.1f} | `{failure.check}`"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
