"""Nothing in the tree installs our distributions by name, because none of our names is registered.

Anybody who registers such a name on a package index could run code wherever the name is installed. Our wheels are
therefore installed as files, and every requirement is another project's.
"""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.dist import client_name, read_project

ROOT = Path(__file__).resolve().parents[2]
_MADE = {"build", "dist", "node_modules", "__pycache__"}
_TEXTS = {".py", ".md", ".sh", ".yaml", ".yml", ".toml", ".txt", ".in", ".json", ".mjs", ".js", ".html", ""}
_PIP = re.compile(r"\bpip3?(?: --python \S+)? (?:install|download|wheel)\b((?:\\\n|\$\([^)\n]*\)|[^\n`;&|#)])*)")
_OURS = re.compile(r"(?<![\w./-])quire(?:-\w+)*(?:\[[a-z][a-z,-]*\]|\s?[=~>]=\s?\d)")
"""A distribution of ours with extras or a version."""


def _texts() -> Iterator[tuple[Path, str]]:
    tops = [path for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in _MADE]
    for top in tops:
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.suffix in _TEXTS and path.is_file() and not _MADE & set(path.parts[len(ROOT.parts) :]):
                yield path.relative_to(ROOT), path.read_text("utf-8")


def installed(text: str) -> Iterator[str]:
    """Yield what a text's pip commands install, as written; `$(ls FILE)` is the file."""
    for command in _PIP.finditer(text):
        words = re.sub(r"\$\(ls ([^)]*)\)", r"\1", command[1].replace("\\\n", " "))
        yield from (word.strip("\"',.") or word.strip("\"',") for word in words.split() if not word.startswith("-"))


def wrong(word: str) -> str:
    """Return the error in a word of a pip command, or an empty string."""
    project = read_project(ROOT)
    wheels = {name.replace("-", "_") for name in (project["name"], client_name(ROOT))}
    file, _, extras = word.partition("[")
    if unknown := set(filter(None, extras.rstrip("]").split(","))) - set(project["optional-dependencies"]):
        return f"there is no extra {unknown}" if file == "" or "quire" in file else ""
    if "quire" not in file:
        return ""
    if re.fullmatch(r"(?:dist|/wheels)/\w+-\*\.whl", file):
        name = file.rpartition("/")[2].removesuffix("-*.whl")
        return "" if name in wheels else f"make dist builds no wheel {name}"
    return "a distribution of ours by its name, which somebody else may register"


def test_no_command_installs_a_distribution_of_ours_by_name() -> None:
    """Every `pip install` in code, messages, pages and scripts names a file that exists, or somebody else's package."""
    found = [(path, word) for path, text in _texts() for word in installed(text) if path.name != Path(__file__).name]
    against = [f"{path}: {word}: {wrong(word)}" for path, word in found if wrong(word)]

    assert len([word for _, word in found if "quire" in word]) >= 7
    assert against == []


def test_no_text_names_a_distribution_of_ours_as_a_requirement() -> None:
    """No command contains `NAME[extra]` or `NAME==version` with one of our names."""
    found = [
        f"{path}: {match[0]}" for path, text in _texts() if path.name != Path(__file__).name
        for match in _OURS.finditer(text)
    ]  # fmt: skip

    assert found == []


def _requirements() -> Iterator[tuple[str, str]]:
    """Yield every requirement that a file of the tree states, with the file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = settings["project"]
    for needs in (
        settings["build-system"]["requires"],
        project["dependencies"],
        *project["optional-dependencies"].values(),
    ):
        yield from (("pyproject.toml", need) for need in needs)
    for path, text in _texts():
        if "requirements" in path.name and path.suffix in (".txt", ".in"):
            yield from ((str(path), line) for line in text.splitlines() if not line.startswith(("#", " ", "-")))
        elif path.name == "package.json":
            package = json.loads(text)
            assert package["private"], path
            yield from ((str(path), name) for kind in package if "ependencies" in kind for name in package[kind])


def test_every_requirement_is_of_somebody_else() -> None:
    """No requirements file contains one of our names."""
    found = list(_requirements())

    assert len(found) > 300
    assert [each for each in found if "quire" in each[1].lower().replace("require", "")] == []


@pytest.mark.parametrize(
    "command",
    [
        "pip install quire-client",
        "pip install 'quire[worker]'",
        "pip install --quiet torch quire-server==0.1.0",
        "pip --python venv/bin/python install --no-deps \\\n  /wheels/quire_client-*.whl",
        'pip install "$(ls dist/quire_server-*.whl)[workers]"',
        "pip install -e '.[worker,gpu]'",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    """One of our names, an unknown wheel and an unknown extra are detected in any command."""
    assert [word for word in installed(command) if wrong(word)] != []


def test_a_right_command_is_not_refused() -> None:
    """Files that exist and packages of others are allowed."""
    command = "pip install --quiet '.[worker]' torch 'uvicorn[standard]' dist/quire_server-*.whl  # quire"

    assert [wrong(word) for word in installed(command)] == ["", "", "", ""]
