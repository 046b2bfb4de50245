"""Print a table of the planted bugs: the first seed that finds each one, how soon, and by which check.

Called as `python -m checks.planted [NAME …]`; without names it tries all of them.
"""

import sys
import time

import pytest

from checks.planted import BUGS, PlantedBug
from checks.sim.coverage import Coverage
from checks.sim.scenario import draw
from checks.sim.simulation import Simulation

MOST_SEEDS = 40
STEPS = 500


def main(names: list[str]) -> int:
    """Print the table; return 1 if a bug is not found."""
    print("| bug | first seed | events | CPU s | found by |")
    print("|---|---|---|---|---|")
    missed = 0
    for bug in BUGS:
        if not names or bug.name in names:
            row = _first_find(bug)
            missed += row is None
            print(f"| `{bug.name}`: {_what(bug)} | {row or 'not found | | |'} |", flush=True)
    return min(missed, 1)


def _what(bug: PlantedBug) -> str:
    """Return the bug's own words, as part of a sentence."""
    text = " ".join((bug.plant.__doc__ or "").split())
    return text[:1].lower() + text[1:].rstrip(".")


def _first_find(bug: PlantedBug) -> str | None:
    """Return the cells of the first seed whose failure is about the bug; CPU time counts all seeds up to it."""
    started = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for seed in range(MOST_SEEDS):
            failure = Simulation(bug.aim(draw(seed)), Coverage()).run(STEPS).failure
            if failure is not None and failure.check in bug.found_by:
                return f"{seed} | {failure.num_events} | {time.process_time() - started:.1f} | `{failure.check}`"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
