"""Planted bugs: patches that break the core, one at a time, and the checks that must find them.

* `bug`: the definition of a planted bug
* `memory`, `checkpoints`, `streams`, `planning`, `workers`, `sharing`, `fates`, `growth`, `speculation`, `charging`,
  `hosts`, `disks`, `suspects`, `urgency`, `resumption`, `holding`, `purposes`, `retention`, `sessions`: the bugs,
  by affected area; importing a module registers its bugs
"""

from checks.planted import (
    charging,
    checkpoints,
    disks,
    fates,
    growth,
    holding,
    hosts,
    memory,
    planning,
    purposes,
    resumption,
    retention,
    sessions,
    sharing,
    speculation,
    streams,
    suspects,
    urgency,
    windows,
    workers,
)
from checks.planted.bug import BUGS, PlantedBug

__all__ = [
    "BUGS",
    "PlantedBug",
    "charging",
    "checkpoints",
    "disks",
    "fates",
    "growth",
    "holding",
    "hosts",
    "memory",
    "planning",
    "purposes",
    "resumption",
    "retention",
    "sessions",
    "sharing",
    "speculation",
    "streams",
    "suspects",
    "urgency",
    "windows",
    "workers",
]
