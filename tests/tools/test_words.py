"""`tools.words` finds the words of its table in prose, and nowhere else."""

from pathlib import Path

from tools.words import findings


def test_words_are_found_in_prose_only(tmp_path: Path) -> None:
    """Docstrings and comments are checked; code, text in backticks and lines marked as right are not."""
    source = tmp_path / "module.py"
    source.write_text(
        '"""The figures of `beside`."""\n'
        "beside = 'nobody'  # beside: words: right\n"
        "forgets = 1  # connects again\n"
    )  # fmt: skip

    found = [line.rpartition("/")[2].split(": write")[0] for line in findings(source, tmp_path)]
    assert found == ["module.py:1: 'figures'", "module.py:3: 'connects again'"]
