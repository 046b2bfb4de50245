"""Write the lock file of the image of front ends and scheduler: every package with its version and SHA-256.

    python -m tools.lock

pip resolves the dependencies of pyproject.toml for the image's Python and platform, without installing anything. The
image installs exactly these files (`--require-hashes`). Other platforms need a lock file of their own.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "deploy" / "requirements-scheduler.txt"
PYTHON_VERSION = "3.12"
"""That of the base image."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def lock_text(report: dict[str, Any]) -> str:
    """Return the lock file for pip's report of an installation."""
    lines = [f"# Made by `python -m tools.lock` for Python {PYTHON_VERSION} on Linux (x86_64)."]
    for each in sorted(report["install"], key=lambda found: found["metadata"]["name"].lower()):
        hashed = each["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{each['metadata']['name'].lower()}=={each['metadata']['version']} --hash=sha256:{hashed}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file; return the exit code."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run",
            "--ignore-installed", "--only-binary=:all:", f"--python-version={PYTHON_VERSION}",
            *(f"--platform={each}" for each in PLATFORMS), f"--target={folder}", f"--report={report}", *wanted,
        ]  # fmt: skip
        if subprocess.run(command, check=False).returncode:
            return 1
        LOCK.write_text(lock_text(json.loads(report.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
