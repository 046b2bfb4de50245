"""The what-if page shows the published errors, and the errors are counted as the page describes."""

import json

import pytest

from measure.studies.whatif_page import PAGE, PLOT, RESULTS, filled, plot, table

FIGURES = ("throughput", "ttft_mean", "ttft_p99", "itl_mean")


def _row(kind: str, error: float, spread: float) -> dict[str, object]:
    return {
        "kind": kind,
        "measured": dict.fromkeys(FIGURES, 0.02),
        "predicted": dict.fromkeys(FIGURES, 0.02 * (1 + error)),
        "spread": dict.fromkeys(FIGURES, spread),
        "error": dict.fromkeys(FIGURES, error),
    }


DOCUMENT = {
    "runs": 2,
    "cpu_share_of_other_programs": 0.01,
    "results": [_row("changed", error, 0.08) for error in (-0.04, 0.07, 0.3)] + [_row("same", 0.9, 0.0)],
}


def test_errors_are_shown_beside_the_spread() -> None:
    """Predictions for a record's own settings do not count; an error within the spread counts as good."""
    lines = table(DOCUMENT).splitlines()

    assert lines[0].startswith("3 predictions")
    assert "| throughput | 7.0% | 30.0% | 30.0% | ± 8.0% | 5% | 2 of 3 |" in lines
    assert plot(DOCUMENT).count("<circle") == 6


@pytest.mark.skipif(not RESULTS.exists(), reason="no errors are published")
def test_the_page_shows_the_published_errors() -> None:
    """docs/replay.md and its plot match the results; `python -m measure.studies.whatif_page` generates them."""
    document = json.loads(RESULTS.read_text("utf-8"))

    assert PAGE.read_text("utf-8") == filled(PAGE.read_text("utf-8"), document)
    assert PLOT.read_text("utf-8") == plot(document)
