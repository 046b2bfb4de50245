"""Environments for third-party clients: one per folder in `tests/clients`, created in build/clients from its lock.

A Python client has `requirements.in` (direct requirements), `requirements.txt` (all packages with versions), and
`client.py`. A Node client has `package.json`, `package-lock.json` and `client.mjs`. An environment is recreated when
its lock file has changed. Lock files omit only torch's version: a client with torch in `requirements.in` gets the
requirement in the variable TORCH, as Quire's own environment does.
"""

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "clients"
BUILD = ROOT / "build" / "clients"
INSTALL_S = 3600


class InstallError(Exception):
    """An environment could not be made."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages and the program of one folder."""

    name: str

    @property
    def source(self) -> Path:
        """The folder with the lock and the program."""
        return FOLDER / self.name

    @property
    def target(self) -> Path:
        """The folder with the installed packages."""
        return BUILD / self.name

    @property
    def is_node(self) -> bool:
        """Whether the program runs in Node."""
        return (self.source / "package.json").exists()

    @property
    def lock(self) -> Path:
        """The file with the versions of all packages."""
        return self.source / ("package-lock.json" if self.is_node else "requirements.txt")

    def make(self) -> None:
        """Install the locked packages, unless they are installed.

        Raises:
            InstallError: the packages could not be installed.
        """
        stamp = self.target / "installed.lock"
        if stamp.exists() and stamp.read_bytes() == self.lock.read_bytes():
            return
        print(f"installing the packages of {self.name} into {self.target}", flush=True)
        shutil.rmtree(self.target, ignore_errors=True)
        if self.is_node:
            self._install_node("ci")
        else:
            self._install_python("--no-deps", "-r", str(self.lock))
        shutil.copyfile(self.lock, stamp)

    def lock_again(self) -> None:
        """Write the lock anew, with the newest versions.

        Raises:
            InstallError: the packages could not be installed.
        """
        shutil.rmtree(self.target, ignore_errors=True)
        if self.is_node:
            self._install_node("update", "--save")
            for name in ("package.json", "package-lock.json"):
                shutil.copyfile(self.target / name, self.source / name)
        else:
            self._install_python("-r", str(self.source / "requirements.in"))
            frozen = _call(str(self.target / "bin" / "pip"), "freeze").splitlines(keepends=True)
            self.lock.write_text("".join(line for line in frozen if not line.startswith("torch==")))
        shutil.copyfile(self.lock, self.target / "installed.lock")

    def command(self) -> list[str]:
        """Return the command that runs the program."""
        if not self.is_node:
            return [str(self.target / "bin" / "python"), str(self.source / "client.py")]
        # Node looks for packages in the folders above a program, so the program runs next to them.
        for program in (self.source / "client.mjs", FOLDER / "probe.mjs"):
            shutil.copyfile(program, self.target / program.name)
        return ["node", str(self.target / "client.mjs")]

    def _install_python(self, *arguments: str) -> None:
        _call(sys.executable, "-m", "venv", str(self.target))
        install = (str(self.target / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check")
        if "torch" in (self.source / "requirements.in").read_text().split():
            _call(*install, *shlex.split(os.environ.get("TORCH", "torch")))
        _call(*install, *arguments)

    def _install_node(self, *arguments: str) -> None:
        self.target.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            if (self.source / name).exists():
                shutil.copyfile(self.source / name, self.target / name)
        _call("npm", *arguments, "--no-audit", "--no-fund", "--ignore-scripts", folder=self.target)


def environments() -> list[Environment]:
    """Return all environments."""
    programs = [*FOLDER.glob("*/client.py"), *FOLDER.glob("*/client.mjs")]
    return [Environment(name) for name in sorted(program.parent.name for program in programs)]


def _call(*command: str, folder: Path | None = None) -> str:
    """Run a command and return its output."""
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{command[0]}: {error}") from None
    if run.returncode:
        raise InstallError(f"{' '.join(command)}: exit code {run.returncode}: {run.stderr[-2000:]}")
    return run.stdout
