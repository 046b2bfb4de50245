"""Many simulations in parallel: different seeds, one process per CPU core, until the time is over.

A campaign fails when a simulation fails. It also fails when an expected event was never seen, because a check that
never runs proves nothing.
"""

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass

from checks.sim.aims import draw_world
from checks.sim.coverage import Coverage, Kind
from checks.sim.report import render
from checks.sim.simulation import Result, Simulation

_MOST_FAILURES = 5
_PROGRESS_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a campaign."""

    num_simulations: int
    num_events: int
    seconds: float
    failures: list[Result]
    coverage: Coverage

    @property
    def ok(self) -> bool:
        """Whether no simulation failed and every expected kind was seen."""
        return not self.failures and not self.coverage.missing()


def run_campaign(*, first_seed: int, steps: int, seconds: float, jobs: int, say: Callable[[str], None]) -> Outcome:
    """Run the seeds from `first_seed` on for a given time.

    Args:
        first_seed: the first seed; the others follow it.
        steps: see `Simulation.run`.
        seconds: time after which no further simulation starts.
        jobs: number of processes.
        say: called with a line about progress or a failure.
    """
    started = reported = time.monotonic()
    coverage = Coverage()
    failures: list[Result] = []
    num_simulations = num_events = 0
    seeds = itertools.count(first_seed)
    running: set[Future[tuple[Result, Counter[Kind]]]] = set()
    with ProcessPoolExecutor(jobs) as pool:
        while True:
            goes_on = time.monotonic() - started < seconds and len(failures) < _MOST_FAILURES
            while goes_on and len(running) < 2 * jobs:
                running.add(pool.submit(_run_one, next(seeds), steps))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for result, counts in (future.result() for future in done):
                num_simulations += 1
                num_events += result.num_events
                coverage.counts.update(counts)
                if result.failure is not None:
                    failures.append(result)
                    say(render(result, steps))
            now = time.monotonic()
            if now - reported > _PROGRESS_S:
                reported = now
                say(f"{now - started:5.0f} s: {num_simulations} simulations, {num_events} events")
    return Outcome(num_simulations, num_events, time.monotonic() - started, failures, coverage)


def summary(outcome: Outcome) -> str:
    """Return the table of counts, followed by one closing line."""
    rate = outcome.num_events / max(outcome.seconds, 1e-9)
    missing = [f"never seen: {group} {name}" for group, name in outcome.coverage.missing()]
    state = "ok" if outcome.ok else "failed"
    closing = (
        f"{state} simulations={outcome.num_simulations} events={outcome.num_events} seconds={outcome.seconds:.0f}"
        f" events_per_s={rate:.0f} failures={len(outcome.failures)}"
    )
    return "\n".join([outcome.coverage.table(), *missing, closing])


def _run_one(seed: int, steps: int) -> tuple[Result, Counter[Kind]]:
    coverage = Coverage()
    # Disable garbage collection, because it takes a tenth of the time and the garbage of one simulation fits into
    # memory.
    gc.disable()
    result = Simulation(draw_world(seed), coverage).run(steps)
    gc.collect()
    return result, coverage.counts
