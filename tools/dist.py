"""Builds two wheels: the client, which other services install, and the server.

    python -m tools.dist                 both wheels, into dist/
    python -m tools.dist --out FOLDER    into another folder
    python -m tools.dist --installed     with the installed setuptools

Each wheel is built from a separate tree under build/dist. The client's wheel contains only the package `quire`. The
server's wheel contains `quire_server`, with all other packages, including the client, in its folder `_packages` (see
`quire_server.entry`). The server therefore requires no distribution of ours, the two wheels have no file in common, and
another project's package named `quire` does not disturb the server. The package `checks`, and all of `measure` except
load generation for a running service, are for developers and omitted.

pyproject.toml states the names of both wheels, in `project.name` and `tool.quire.client`.
"""

import argparse
import ast
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGE = ROOT / "build" / "dist"
CLIENT_NEEDS = ("googleapis-common-protos", "grpcio", "grpcio-status", "opentelemetry-api", "protobuf")
PRIVATE = ("kernels", "measure", "protos", "quire", "records", "scheduler_svc", "services", "shared", "worker_svc")
"""Packages that the server's wheel has in `quire_server/_packages`: common names, and the client."""
LEFT_OUT = ("measure/*", "measure/commands/*")
"""Parts that only developers use; see `quire_server.cli.main` for the commands that need it."""
_COMMANDS = ("__init__", "_load", "bench_serve", "bench_sweep", "replay")
TAKEN = (
    "measure/__init__.py",
    "measure/commands",
    "measure/load",
    "measure/spread.py",
    *(f"measure/commands/{name}.py" for name in _COMMANDS),
)
"""Parts of these packages in the wheel: load generation, and what-if replays, which read load traces."""


def stage_client(root: Path, stage: Path) -> Path:
    """Lay out the client's tree; return its folder."""
    project = read_project(root)
    needs = [need for need in project["dependencies"] if _name(need) in CLIENT_NEEDS]
    needs += [] if any(_name(need) == "opentelemetry-api" for need in needs) else ["opentelemetry-api>=1.30"]
    folder = _fresh(stage / "client")
    _copy(root, folder, ["quire"])
    shutil.copy(root / "LICENSE", folder)
    shutil.copy(root / "quire" / "README.md", folder / "README.md")
    description = "Client for Quire, an LLM inference server: blocking and asyncio, typed"
    del project["scripts"]
    project |= {"name": client_name(root), "description": description, "dependencies": needs}
    _write_project(folder, "quire", project, {})
    return folder


def stage_server(root: Path, stage: Path) -> Path:
    """Lay out the server's tree; return its folder."""
    project = read_project(root)
    folder = _fresh(stage / "server")
    _copy(root, folder, ["quire_server"])
    _copy(root, folder / "quire_server" / "_packages", PRIVATE)
    for name in ("LICENSE", "README.md", "setup.py"):
        if (root / name).exists():
            shutil.copy(root / name, folder)
    extras = {name: needs for name, needs in project["optional-dependencies"].items() if name != "dev"}
    _write_project(folder, "quire_server", project, extras)
    return folder


def build(folder: Path, out: Path, *, isolated: bool = True) -> None:
    """Build the wheel of a tree.

    Args:
        folder: the tree.
        out: folder for the wheel.
        isolated: build with a setuptools that pip fetches, instead of the installed one.

    Raises:
        subprocess.CalledProcessError: pip failed; its error is on stderr.
    """
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += [] if isolated else ["--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(out), str(folder)], check=True)


def read_project(root: Path) -> dict[str, Any]:
    """Return the table `project` of a source tree, with the version that its package `quire` states."""
    project: dict[str, Any] = _settings(root)["project"]
    assignment = ast.parse((root / "quire" / "_version.py").read_text("utf-8")).body[-1]
    assert isinstance(assignment, ast.Assign), "quire/_version.py ends with the version"
    return {**project, "version": ast.literal_eval(assignment.value)}


def client_name(root: Path) -> str:
    """Return the name of the client's distribution."""
    name: str = _settings(root)["tool"]["quire"]["client"]
    return name


def _settings(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))


def _name(requirement: str) -> str:
    return requirement.split(">")[0].split("=")[0].strip()


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _copy(root: Path, target: Path, names: Sequence[str]) -> None:
    left_out = {path for pattern in LEFT_OUT for path in root.glob(pattern)} - {root / name for name in TAKEN}

    def ignored(folder: str, entries: list[str]) -> set[str]:
        built = {name for name in entries if name == "__pycache__" or name.endswith((".so", ".pyc"))}
        return built | {name for name in entries if Path(folder, name) in left_out}

    for name in names:
        shutil.copytree(root / name, target / name, ignore=ignored)


def _write_project(folder: Path, package: str, project: dict[str, Any], extras: dict[str, list[str]]) -> None:
    """Write pyproject.toml; what JSON writes here is also TOML."""
    keys = ("name", "version", "description", "readme", "license", "license-files", "requires-python", "dependencies")
    tables: dict[str, dict[str, Any]] = {
        "build-system": {"requires": ["setuptools>=77"], "build-backend": "setuptools.build_meta"},
        "project": {key: project[key] for key in keys},
        "project.optional-dependencies": extras,
        "project.scripts": project.get("scripts", {}),
        "tool.setuptools.packages.find": {"namespaces": True, "include": [f"{package}*"]},
        "tool.setuptools.package-data": {'"*"': ["*"]},
    }
    text = ""
    for table, values in tables.items():
        text += f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + "\n"
    (folder / "pyproject.toml").write_text(text, "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build both wheels."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description="Build both wheels.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default: dist)")
    parser.add_argument(
        "--installed", action="store_true", help="build with the installed setuptools, not with one that pip fetches"
    )
    options = parser.parse_args(arguments)
    # The commands of the README install dist/NAME-*.whl, so no wheel of another version may stay there.
    for name in (client_name(ROOT), read_project(ROOT)["name"]):
        for old in options.out.glob(f"{name.replace('-', '_')}-*.whl"):
            old.unlink()
    for stage in (stage_client, stage_server):
        build(stage(ROOT, STAGE), options.out, isolated=not options.installed)
    for wheel in sorted(options.out.glob("*.whl")):
        print(f"{wheel}: {wheel.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
