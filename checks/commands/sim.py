"""Simulates the scheduler core with faults and checks its invariants.

With --seed, one simulation runs. The seed determines the whole simulation, so a failure can be replayed. With
--minutes, one process per CPU core runs simulations for this time, and coverage is counted over all simulations.

A step of the core that takes more than ten seconds of CPU time is a failure: the core hangs.
"""

import os
import random
from pathlib import Path

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire sim --seed 7
  quire sim --seed 7 --steps 2000 --log sim.log
  quire sim --minutes 10
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--seed", type=int, metavar="N", help="seed of the simulation, or the first seed (default: random)")
    add("--steps", type=int, default=5000, metavar="M", help="events in the phase with faults (default: 5000)")
    add("--minutes", type=float, metavar="T", help="simulate successive seeds from --seed for this many minutes")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="J",
        help="number of processes with --minutes (default: all cores)",
    )
    add(
        "--log",
        type=Path,
        metavar="FILE",
        help="write every event, effect and plan of a single simulation to this file",
    )


def run(options: Namespace) -> int:
    """Run the simulation."""
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    if options.minutes is not None:
        if not options.minutes > 0:
            raise CommandError(f"--minutes: {options.minutes:g} is too small; use a number > 0")
        return _campaign(seed, options)
    return _one(seed, options.steps, options.log)


def _one(seed: int, steps: int, log: Path | None) -> int:
    from checks.sim.aims import draw_world
    from checks.sim.coverage import Coverage
    from checks.sim.report import line, render
    from checks.sim.simulation import Simulation

    if log is None:
        result = Simulation(draw_world(seed), Coverage()).run(steps)
    else:
        with log.open("w", encoding="utf-8") as file:
            world = draw_world(seed)
            result = Simulation(world, Coverage(), lambda now, what: print(line(now, what), file=file)).run(steps)
    print(render(result, steps))
    return 0 if result.failure is None else 1


def _campaign(seed: int, options: Namespace) -> int:
    from checks.sim.campaign import run_campaign, summary

    print(f"seeds from {seed} on, {options.steps} steps each, {options.jobs} processes", flush=True)
    outcome = run_campaign(
        first_seed=seed,
        steps=options.steps,
        seconds=60 * options.minutes,
        jobs=options.jobs,
        say=lambda text: print(text, flush=True),
    )
    print(summary(outcome), flush=True)
    return 0 if outcome.ok else 1
