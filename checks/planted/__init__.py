"""Bugs to plant into the core, one at a time: each is a patch and the checks that may find it.

* `bug`: what one is
* `memory`, `streams`, `planning`, `workers`, `sharing`, `fates`, `growth`, `speculation`, `charging`, `hosts`,
  `suspects`, `urgency`, `resumption`, `holding`: the bugs, by what they spoil; importing a module registers them
"""

from checks.planted import (
    charging,
    fates,
    growth,
    holding,
    hosts,
    memory,
    planning,
    resumption,
    sharing,
    speculation,
    streams,
    suspects,
    urgency,
    workers,
)
from checks.planted.bug import BUGS, PlantedBug

__all__ = [
    "BUGS",
    "PlantedBug",
    "charging",
    "fates",
    "growth",
    "holding",
    "hosts",
    "memory",
    "planning",
    "resumption",
    "sharing",
    "speculation",
    "streams",
    "suspects",
    "urgency",
    "workers",
]
