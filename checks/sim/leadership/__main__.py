"""Command line of the simulation of leases."""

import sys

from checks.sim.leadership.command import main

sys.exit(main())
