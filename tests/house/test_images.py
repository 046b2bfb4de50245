"""The images are built from a part of the tree; what their installation needs must be in it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def sent(image: str) -> set[str]:
    """What the builder of an image is sent of the tree."""
    lines = (ROOT / "deploy" / f"Dockerfile.{image}.dockerignore").read_text().splitlines()
    assert "*" in lines, "all else is left out"
    return {line[1:] for line in lines if line.startswith("!")}


@pytest.mark.parametrize("image", ["scheduler", "worker"])
def test_an_image_is_sent_all_packages(image: str) -> None:
    """Every package that is installed, and what the project's description names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    named = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}

    assert packages | named <= sent(image)


def test_the_worker_is_sent_what_builds_the_cpu_kernels() -> None:
    """Without `setup.py` it would install without them, and say nothing. The scheduler computes nothing."""
    assert "setup.py" in sent("worker")
    assert "setup.py" not in sent("scheduler")


def test_the_lock_file_has_every_dependency_with_a_hash() -> None:
    """The image installs exactly these files; a new dependency needs a new lock file (python -m tools.lock)."""
    lines = (ROOT / "deploy" / "requirements-scheduler.txt").read_text().splitlines()[1:]
    locked = {line.partition("==")[0].replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert {re.split(r"[<>=\[; ]", need)[0] for need in project["dependencies"]} <= locked
    assert all(re.fullmatch(r"[a-z0-9._-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    assert not {"torch", "triton", "transformers"} & locked
    assert "deploy/requirements-scheduler.txt" in sent("scheduler")
