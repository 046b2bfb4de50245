"""Bugs to plant into the core, one at a time: each is a patch and the checks that may find it.

* `bug`: what one is
* `memory`, `streams`, `planning`, `workers`, `sharing`, `fates`, `growth`, `speculation`: the bugs, by what they spoil;
  importing a module registers them
"""

from checks.planted import (
    fates,
    growth,
    memory,
    planning,
    sharing,
    speculation,
    streams,
    workers,
)
from checks.planted.bug import BUGS, PlantedBug

__all__ = [
    "BUGS",
    "PlantedBug",
    "fates",
    "growth",
    "memory",
    "planning",
    "sharing",
    "speculation",
    "streams",
    "workers",
]
