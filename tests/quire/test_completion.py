"""The completion of `quire` in bash."""

import shutil
import subprocess
from pathlib import Path

import pytest

from quire_server.cli.completion import script
from quire_server.cli.main import COMMANDS

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, in a file."""
    file = tmp_path_factory.mktemp("completion") / "quire"
    file.write_text(script(), "utf-8")
    return file


def offered(completion: Path, *words: str) -> set[str]:
    """Return what bash offers for the last word of a command line."""
    code = '. "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _quire; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-u", "-c", code, completion, *words], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("quire se", {"serve"}),
        ("quire bench s", {"serve", "sweep", "scheduler", "strategies"}),
        ("quire help be", {"bench"}),
        ("quire help bench sw", {"sweep"}),
        ("quire serve --policy f", {"fcfs", "fair"}),
        ("quire serve --policy = f", {"fcfs", "fair"}),
        ("quire serve m --policy =", {"balanced", "fcfs", "priority", "sjf", "edf", "slo", "fair", "lpm"}),
        ("quire serve --worker-sil", {"--worker-silence-s"}),
        ("quire serve --no-cons", {"--no-console"}),
        ("quire bench serve --prompts t", {"tokens", "text"}),
        ("quire record sh", {"show"}),
        ("quire completion b", {"bash"}),
    ],
)
def test_bash_offers_what_fits(completion: Path, line: str, words: set[str]) -> None:
    """Commands, flags, also rare ones, and the values of a flag with choices."""
    assert offered(completion, *line.split(" ")) == words


def test_every_command_is_offered(completion: Path) -> None:
    """The first word is a command or a group of commands."""
    assert offered(completion, "quire", "") == {command.name.split()[0] for command in COMMANDS} | {"help"}


@pytest.mark.parametrize("line", ["quire serve --tls-cert x", "quire serve mod", "quire replay x"])
def test_files_are_left_to_bash(completion: Path, line: str) -> None:
    """Where a path may stand, nothing is offered, so bash completes file names."""
    assert offered(completion, *line.split(" ")) == set()
