"""Writes the images' lock files, and the lock file for building: every package with its version and SHA-256.

    make locks
    make locks ARGS="--torch-wheels /wheels"

pip resolves the dependencies in pyproject.toml for the images' Python version and platform. It reads metadata only, so
CUDA's lock file needs no download of gigabytes. The images install exactly these files (`--require-hashes`). Torch for
CPUs
is not on PyPI: pip looks for it at --torch-wheels, a page or a folder. Other platforms need lock files of their own.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PYTHON_VERSION = "3.11"
"""That of the base image."""
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, *range(17, 37))))
"""Those that the base image can install: its glibc is 2.36."""
TORCH = "2.13.0"
TORCH_WHEELS = "https://download.pytorch.org/whl/cpu/torch/"
IMAGES = ("scheduler", "worker-cpu", "worker-cuda")
BUILD = "build"
"""Lock file for building Quire's wheels; no image contains these packages."""
LEFT_OUT = {"scheduler": {"hf-xet"}}
"""By image: packages that their dependents import only where they are installed.

hf-xet speeds up weight downloads. Front ends download only tokenizer files.
"""


def lock_of(image: str) -> Path:
    """Return the lock file of an image, or of BUILD."""
    return DEPLOY / f"requirements-{image}.txt"


def wanted(image: str) -> list[str]:
    """Return the requirements for an image, or for BUILD. CPU kernels do not need triton."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = described["project"]
    needs: list[str] = described["build-system"]["requires"] if image == BUILD else project["dependencies"]
    if image in ("scheduler", BUILD):
        return needs
    extra = project["optional-dependencies"]["worker"]
    left_out = ("torch", "triton") if image == "worker-cpu" else ("torch",)
    # Three signs: without the local part, `+cpu` is another version.
    torch = f"torch==={TORCH}+cpu" if image == "worker-cpu" else f"torch==={TORCH}"
    return [*needs, *(each for each in extra if re.split(r"\W", each)[0] not in left_out), torch]


def locked(image: str) -> dict[str, str]:
    """Return each package's version in an image's lock file."""
    lines = lock_of(image).read_text("utf-8").splitlines()
    return dict(line.split()[0].split("==") for line in lines if not line.startswith("#"))


def report(image: str, wanted: Sequence[str], torch_wheels: str, *options: str) -> list[dict[str, Any]]:
    """Return what pip would install in an image for requirements, by name: metadata, and each file's hash.

    Raises:
        subprocess.CalledProcessError: pip failed; its error is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run",
            "--ignore-installed", "--only-binary=:all:", f"--python-version={PYTHON_VERSION}",
            *(f"--platform={each}" for each in PLATFORMS), f"--target={folder}", f"--report={path}",
            *([f"--find-links={torch_wheels}"] if image == "worker-cpu" else []), *options, *wanted,
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["install"]
    return sorted(found, key=lambda each: name_of(each))


def name_of(found: dict[str, Any]) -> str:
    """Return the name of a package in pip's report, as an index writes it."""
    return re.sub(r"[-_.]+", "-", found["metadata"]["name"]).lower()


def lock_text(found: Sequence[dict[str, Any]]) -> str:
    """Return the lock file for pip's report of an installation."""
    lines = [f"# Made by `make locks` for Python {PYTHON_VERSION} on Linux (x86_64)."]
    for each in found:
        hashed = each["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name_of(each)}=={each['metadata']['version']} --hash=sha256:{hashed}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.lock", description="Write the lock files of the images.")
    parser.add_argument("--torch-wheels", default=TORCH_WHEELS, help="page or folder with torch for CPUs")
    options = parser.parse_args(arguments)
    constraints: list[str] = []
    for image in (*IMAGES, BUILD):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            # Packages that images share have one version in all of them.
            file.write("\n".join(constraints))
            file.flush()
            found = report(image, wanted(image), options.torch_wheels, f"--constraint={file.name}")
        found = [each for each in found if name_of(each) not in LEFT_OUT.get(image, ())]
        lock_of(image).write_text(lock_text(found), "utf-8")
        constraints = constraints or [f"{name_of(each)}=={each['metadata']['version']}" for each in found]
        print(f"{lock_of(image).relative_to(ROOT)}: {len(found)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
