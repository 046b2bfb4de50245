"""Definition of planted bugs and of the checks that must find them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from checks.sim.aims import Aim

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """A bug, and a set of checks, one of which must find it. The check "core" is an assertion in the core.

    If a bug needs a rare situation, the scenarios are adapted so that this situation is more frequent.
    """

    name: str
    plant: Patch
    found_by: frozenset[str]
    aim: Aim
    unseen: str
    """Why no check finds the bug; empty if a check finds it."""


BUGS: list[PlantedBug] = []


def bug(*found_by: str, aim: Aim = lambda scenario: scenario, unseen: str = "") -> Callable[[Patch], Patch]:
    """Register a patch as a planted bug."""

    def register(patch: Patch) -> Patch:
        BUGS.append(PlantedBug(patch.__name__, patch, frozenset(found_by), aim, unseen))
        return patch

    return register


def wrap(patch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a function by `around(original, *arguments)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **keywords: around(original, *arguments, **keywords))
