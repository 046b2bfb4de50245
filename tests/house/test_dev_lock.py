"""The lock of the development environment."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CHOSEN_BY_THE_USER = {"torch", "triton"}


def test_the_lock_satisfies_every_requirement() -> None:
    """requirements-dev.txt pins the requirements of pyproject.toml with hashes, except torch and triton."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(each) for each in (*project["dependencies"], *extras["worker"], *extras["dev"])]
    lock = (ROOT / "requirements-dev.txt").read_text("utf-8")
    entries = [entry.split("--hash") for entry in lock.replace("\\\n", "").splitlines() if not entry.startswith("#")]
    locked = {
        requirement.name: requirement
        for requirement in (Requirement(entry[0]) for entry in entries)
        if requirement.marker is None or requirement.marker.evaluate()
    }

    assert all(len(entry) > 1 for entry in entries)
    for requirement in wanted:
        name = canonicalize_name(requirement.name)
        if name not in CHOSEN_BY_THE_USER:
            (pin,) = locked[name].specifier
            assert requirement.specifier.contains(pin.version), f"{requirement}: locked {pin}; run make dev-lock"
