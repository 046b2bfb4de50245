"""What `make help` and `make lint` promise about the house itself."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
FIELD = "  uint64 step = 1;"

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
needs_buf = pytest.mark.skipif(not (BIN / "buf").exists(), reason="needs buf")


def run(*command: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """Run a command and return its result."""
    return subprocess.run(
        command,
        cwd=folder,
        # No settings of the user's or the machine's git; a missing file counts as an empty one.
        env=os.environ | {"GIT_CONFIG_GLOBAL": str(folder / "no.gitconfig"), "GIT_CONFIG_NOSYSTEM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def git(folder: Path, *arguments: str) -> None:
    """Run git in a folder."""
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    ended = run("git", *identity, *arguments, folder=folder)
    assert ended.returncode == 0, ended.stderr


def breaking(folder: Path) -> "subprocess.CompletedProcess[str]":
    """`make protos-breaking` with this installation's buf, and without setting up another one."""
    return run("make", "-o", "setup", f"BIN={BIN}", "protos-breaking", folder=folder)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with our protos in one commit on a branch `work`; no `main` yet."""
    shutil.copytree(ROOT / "protos", tmp_path / "protos", ignore=shutil.ignore_patterns("*.py*", "__pycache__"))
    for name in ("Makefile", "buf.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "-q", "-b", "work")
    (tmp_path / ".gitignore").write_text("build\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "protos")
    return tmp_path


def test_help_lists_every_target() -> None:
    """Each target is listed with its description, and is made even if a file has the same name."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    listed = set(re.findall(r"^  make ([a-z-]+)  ", run("make", "help").stdout, re.MULTILINE))

    assert phony is not None
    assert targets == set(phony[1].split()) == listed


@needs_git
@needs_buf
def test_a_broken_proto_is_found(clone: Path) -> None:
    """A field with another type than main's is an error, committed or not; the protos of main are not."""
    git(clone, "branch", "main")
    plan = clone / "protos/quire/plan/v1/plan.proto"
    assert FIELD in plan.read_text()
    plan.write_text(plan.read_text().replace(FIELD, "  string step = 1;", 1))

    uncommitted = breaking(clone)
    git(clone, "commit", "-qam", "broken")
    committed = breaking(clone)
    git(clone, "checkout", "-q", "main")
    (clone / "README").touch()
    git(clone, "add", ".")
    git(clone, "commit", "-qm", "harmless")
    harmless = breaking(clone)
    git(clone, "merge", "-q", "-m", "merge", "work")
    merged = breaking(clone)

    for found in (uncommitted, committed, merged):
        assert found.returncode != 0
        assert "plan.proto" in found.stdout + found.stderr
    assert harmless.returncode == 0, harmless.stdout + harmless.stderr
    assert "nothing broken since" in harmless.stdout


@needs_git
@needs_buf
def test_without_a_base_to_compare_with_a_message_says_so(clone: Path) -> None:
    """A clone without main, or with a single commit, gets a message instead of an error."""
    without_main = breaking(clone)
    git(clone, "branch", "-m", "main")
    single_commit = breaking(clone)

    assert "neither origin/main nor main" in without_main.stdout
    assert "no commit before this one" in single_commit.stdout
    assert (without_main.returncode, single_commit.returncode) == (0, 0)
