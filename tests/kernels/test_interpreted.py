"""Runs the tests of `tests/kernels/interpreted` under Triton's interpreter, each file by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.interpreted import check_interpreted

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(FOLDER.glob("test_*.py"))

pytest.importorskip("triton", reason="the kernels need triton to be interpreted")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_equal_their_references(file: Path) -> None:
    """Every Triton kernel, interpreted, equals its reference."""
    check_interpreted(file)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_kernels_equal_their_references_at_rarer_shapes() -> None:
    """The same at shapes that take long."""
    check_interpreted(FOLDER, "release", limit_s=3600)
