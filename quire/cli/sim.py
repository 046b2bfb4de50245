"""Runs the scheduler core in simulated worlds and checks every promise it makes.

With --seed one world is simulated; its seed says everything about it, so a failure is replayed by its seed. With
--minutes as many worlds as fit are simulated, one process per core, and everything that was seen is counted.
"""

import os
import random
from pathlib import Path

from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire sim --seed 7
  quire sim --seed 7 --steps 2000 --log sim.log
  quire sim --minutes 10
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add("--seed", type=int, metavar="N", help="the world, or the first of them; default: a random one")
    add("--steps", type=int, default=5000, metavar="M", help="events of the phase with faults (5000)")
    add("--minutes", type=float, metavar="T", help="simulate seeds from --seed on for so long")
    add("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="processes, with --minutes")
    add("--log", type=Path, metavar="FILE", help="write every event, effect and plan of the one simulation")


def run(options: Namespace) -> int:
    """Simulates."""
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    if options.minutes is not None:
        return _campaign(seed, options)
    return _one(seed, options.steps, options.log)


def _one(seed: int, steps: int, log: Path | None) -> int:
    from scheduler_svc.sim.coverage import Coverage
    from scheduler_svc.sim.report import line, render
    from scheduler_svc.sim.scenario import draw
    from scheduler_svc.sim.simulation import Simulation

    if log is None:
        result = Simulation(draw(seed), Coverage()).run(steps)
    else:
        with log.open("w") as file:
            result = Simulation(draw(seed), Coverage(), lambda now, what: print(line(now, what), file=file)).run(steps)
    print(render(result, steps))
    return 0 if result.failure is None else 1


def _campaign(seed: int, options: Namespace) -> int:
    from scheduler_svc.sim.campaign import run_campaign, summary

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
