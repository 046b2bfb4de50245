"""Command line of the simulation of leases."""

import sys

from checks.sim.leadership.command import main

if __name__ == "__main__":
    sys.exit(main())
