"""The documentation names modules that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_MODULE = re.compile(r"`((?:core|kernels|quire|scheduler_svc|services|shared|tests|tools|worker_svc)/[\w/]+\.py)`")


def _path(name: str) -> Path:
    return ROOT / "scheduler_svc" / name if name.startswith("core/") else ROOT / name


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.name)
def test_modules_that_a_page_names_exist(doc: Path) -> None:
    """A page that names a module goes stale visibly when the module moves; `core/` stands for `scheduler_svc/core/`."""
    assert [name for name in _MODULE.findall(doc.read_text("utf-8")) if not _path(name).exists()] == []


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
