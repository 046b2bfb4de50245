"""The documentation names modules that exist."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_server.cli._parser import OneLineParser
from quire_server.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MODULE = re.compile(r"`((?:core|kernels|quire|scheduler_svc|services|shared|tests|tools|worker_svc)/[\w/]+\.py)`")


def _path(name: str) -> Path:
    return ROOT / "scheduler_svc" / name if name.startswith("core/") else ROOT / name


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_modules_that_a_page_names_exist(doc: Path) -> None:
    """If a module moves, a page that names it fails this test; `core/` stands for `scheduler_svc/core/`."""
    assert [name for name in _MODULE.findall(doc.read_text("utf-8")) if not _path(name).exists()] == []


def _command_lines(text: str) -> Iterator[str]:
    """Yield the `quire` command lines in a page's code blocks, without comments and other programs' arguments."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"[|;&>]+", line.partition("  #")[0]):
                words = [word for word in part.split() if not re.match(r"[A-Z_]+=", word)]
                if words and words[0].rpartition("/")[2] == "quire":
                    yield " ".join(words[1:])


def _wrong(line: str) -> str:
    """Return the error in a command line, or an empty string."""
    words = line.split()
    command = next((each for each in COMMANDS if each.name.split() == words[: len(each.name.split())]), None)
    if command is None:
        return "" if words[0] == "help" else f"no command: {line}"
    parser = OneLineParser(command.name, description="", examples="")
    importlib.import_module(command.module).configure(parser)
    flags = {flag for action in parser.actions() for flag in action.option_strings}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in flags]
    return f"no flag: {unknown[0]} in {line}" if unknown else ""


@pytest.mark.parametrize(
    "page",
    [*DOCS, *sorted((ROOT / "deploy").rglob("README.md")), ROOT / "SECURITY.md"],
    ids=lambda page: str(page.name),
)
def test_command_lines_of_a_page_exist(page: Path) -> None:
    """Every `quire` command and flag in a code block exists."""
    assert [wrong for line in _command_lines(page.read_text("utf-8")) if (wrong := _wrong(line))] == []


def test_wrong_command_lines_are_found() -> None:
    """An unknown command or flag is detected in any context; comments are not read."""
    block = (
        "```sh\nX=1 .venv/bin/quire topp --once  # quire nothing\nquire top --twice | quire help\nquire top --once\n```"
    )

    assert [bool(_wrong(line)) for line in _command_lines(block)] == [True, True, False, False]


def test_one_name_of_a_file_stands_for_one_format() -> None:
    """In examples, requests.jsonl is a file of `quire batch`; other commands read other formats."""
    pages = [*DOCS, *sorted((ROOT / "quire_server" / "cli").glob("*.py"))]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines() if "requests.jsonl" in line]

    assert lines
    assert [line for line in lines if "quire batch" not in line] == []


def test_the_glossary_has_one_line_per_term() -> None:
    """No term is explained twice."""
    sections = (ROOT / "docs" / "glossary.md").read_text("utf-8").split("\n## ")[1:-1]
    terms = [line.split("|")[1].strip() for section in sections for line in section.splitlines() if "`" in line]

    assert len(terms) >= 55
    assert len(set(terms)) == len(terms)


def test_the_index_has_every_page() -> None:
    """docs/README.md leads to every page."""
    index = (ROOT / "docs" / "README.md").read_text("utf-8")

    assert [page.name for page in DOCS if page.name != "README.md" and f"({page.name})" not in index] == []
