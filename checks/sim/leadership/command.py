"""Runs simulations of leases with consecutive seeds."""

import argparse

from checks.sim import leadership
from checks.sim.leadership.events import BrokenPromiseError
from checks.sim.leadership.world import World


def main() -> int:
    """Run simulations; print the promises that were broken."""
    parser = argparse.ArgumentParser(prog="python -m checks.sim.leadership", description=leadership.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100, help="number of simulations")
    options = parser.parse_args()
    takeovers = tokens = filled = again = copies = failures = 0
    for seed in range(options.seed, options.seed + options.seeds):
        world = World(seed)
        try:
            takeovers += world.run()
        except BrokenPromiseError as error:
            failures += 1
            print(f"seed={seed} {error}")
        tokens, filled = tokens + len(world.accepted), filled + world.filled
        again, copies = again + world.fleet.computed_again, copies + world.replication.starts_over
    print(
        f"simulations={options.seeds} takeovers={takeovers} tokens={tokens} filled={filled} computed_again={again}"
        f" copies={copies} failures={failures}"
    )
    return 1 if failures else 0
