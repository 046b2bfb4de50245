"""The images are built from part of the tree. That part must contain every file that the installation needs."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.deploy.images import Instruction, context, dockerfile, filled, read, sources
from tools.dist import PRIVATE
from tools.lock import BUILD, IMAGES, TORCH, lock_of, locked, wanted

ROOT = Path(__file__).resolve().parents[2]


def sent(image: str) -> set[str]:
    """The part of the tree that is sent to an image's builder."""
    lines = (ROOT / "deploy" / f"Dockerfile.{image}.dockerignore").read_text().splitlines()
    assert "*" in lines, "all else is left out"
    return {line[1:] for line in lines if line.startswith("!")}


@pytest.mark.parametrize("image", ["scheduler", "worker"])
def test_an_image_is_sent_all_packages(image: str) -> None:
    """Every package that is installed, and every file that pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {*PRIVATE, "quire_server"}
    named = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}

    assert packages | named <= sent(image)


def test_the_worker_is_sent_what_builds_the_cpu_kernels() -> None:
    """Without `setup.py` it would install without them, and say nothing. The scheduler computes nothing."""
    assert "setup.py" in sent("worker")
    assert "setup.py" not in sent("scheduler")


@pytest.mark.parametrize("image", [*IMAGES, BUILD])
def test_a_lock_file_has_every_dependency_with_a_hash(image: str) -> None:
    """The images install exactly these files; a new dependency needs new lock files (make locks)."""
    lines = lock_of(image).read_text().splitlines()[1:]
    needs = {re.split(r"[<>=\[; ]", need)[0] for need in wanted(image)}

    assert needs <= locked(image).keys()
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_only_images_with_a_gpu_have_what_a_gpu_needs() -> None:
    """Front ends and scheduler have no torch; CPU workers have no triton and no CUDA packages."""
    assert not {"torch", "triton", "transformers"} & locked("scheduler").keys()
    assert locked("worker-cpu")["torch"] == f"{TORCH}+cpu"
    assert not [name for name in locked("worker-cpu") if name == "triton" or name.startswith("nvidia")]
    assert {"triton", "nvidia-cublas", "nvidia-nccl-cu13"} <= locked("worker-cuda").keys()


def test_images_have_one_version_of_each_package() -> None:
    """Processes of a cell speak through the same libraries."""
    for image in IMAGES:
        for name, version in locked("scheduler").items():
            assert locked(image)[name] == version


@pytest.mark.parametrize("image", IMAGES)
def test_a_bill_of_materials_lists_the_packages_of_the_lock_file(image: str) -> None:
    """Each has its version, hash, licence and purl (make sbom after make locks)."""
    bill = json.loads((ROOT / "deploy" / "sbom" / f"quire-{image}.cdx.json").read_text())
    listed = {each["name"]: each for each in bill["components"]}
    hashes = dict(re.findall(r"^(\S+)==.*sha256:(\w+)$", lock_of(image).read_text(), re.MULTILINE))

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {name: each["version"] for name, each in listed.items()} == locked(image)
    assert {name: each["hashes"][0]["content"] for name, each in listed.items()} == hashes
    for name, each in listed.items():
        (found,) = each["licenses"]
        assert found.get("expression") or found["license"].get("id") or found["license"].get("name"), name
        assert each["purl"].startswith(f"pkg:pypi/{name}@")


@pytest.mark.parametrize("image", ["scheduler", "worker"])
def test_a_dockerfile_copies_what_exists(image: str) -> None:
    """Each COPY finds its files in the build context; a stage that it names is defined before it."""
    files = context(dockerfile(image))
    for device in ("cpu", "cuda"):
        stages: list[str] = []
        values = {"DEVICE": device, "LOCK": f"requirements-worker-{device}.txt"}
        for step in read(dockerfile(image)):
            if step.name == "FROM":
                base, _, stage = filled(step.value, values).partition(" AS ")
                assert base in stages or base == "debian:bookworm-slim"
                stages.append(stage)
            if step.name == "COPY" and step.flag("from"):
                assert step.flag("from") in stages
            elif step.name == "COPY":
                assert sources(Instruction("COPY", filled(step.value, values)), files), step


@pytest.mark.parametrize("image", ["scheduler", "worker"])
def test_a_dockerfile_starts_a_command_that_is_installed(image: str) -> None:
    """The entry point is a script of the project, and the command line accepts the arguments; the user is not root."""
    steps = {step.name: step.value for step in read(dockerfile(image))}
    started = json.loads(steps["ENTRYPOINT"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert started[0] in project["scripts"]
    assert int(steps["USER"]) >= 10000
    command = [sys.executable, "-m", "quire_server.cli.main", *started[1:], *json.loads(steps["CMD"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
