"""Write the table and the plot in docs/replay.md from the saved errors: `python -m measure.studies.whatif_page`.

`python -m measure.studies.whatif --json measure/results/whatif.json` measures them.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from measure.load.svg import Series, lines

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "replay.md"
PLOT = _ROOT / "docs" / "plots" / "whatif.svg"
RESULTS = _ROOT / "measure" / "results" / "whatif.json"
_BEGIN, _END = "<!-- errors -->", "<!-- end of errors -->"
_FIGURES = (
    ("throughput", "throughput", 0.05),
    ("ttft_mean", "TTFT mean", 0.10),
    ("ttft_p99", "TTFT p99", 0.20),
    ("itl_mean", "ITL mean", None),
)
"""Name in the file, title, and target error."""


def table(document: dict[str, Any]) -> str:
    """Return the errors of all predictions for changed settings, compared with the spread of the real runs."""
    pairs = _pairs(document)
    text = [
        f"{len(pairs)} predictions of a setting from the record of another one, each against the mean of"
        f" {document['runs']} real runs. {_by_others(document)}",
        "",
        "| | error, median | 9 of 10 at most | largest | spread of real runs, median | aim | within aim or spread |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, title, aim in _FIGURES:
        errors = sorted(abs(pair["error"][name]) for pair in pairs)
        spreads = [pair["spread"][name] for pair in pairs]
        within = sum(abs(pair["error"][name]) <= max(aim or 0.0, pair["spread"][name]) for pair in pairs)
        ninth = errors[max(0, -(-9 * len(errors) // 10) - 1)]
        text.append(
            f"| {title} | {median(errors):.1%} | {ninth:.1%} | {errors[-1]:.1%} | ± {median(spreads):.1%}"
            f" | {f'{aim:.0%}' if aim else '-'} | {within} of {len(pairs)} |"
        )
    return "\n".join(text)


def plot(document: dict[str, Any]) -> str:
    """Return the chart of predicted over measured TTFT. On the dashed line, both are equal."""
    pairs = _pairs(document)
    series = [
        Series(title, [(1000 * pair["measured"][name], 1000 * pair["predicted"][name]) for pair in pairs],
               labels=[""] * len(pairs), is_line=False)
        for name, title, _ in _FIGURES
        if name in ("ttft_mean", "ttft_p99")
    ]  # fmt: skip
    longest = max(max(point) for each in series for point in each.points)
    equal = Series("equal", [(0.0, 0.0), (longest, longest)], is_bound=True)
    return lines("TTFT: predicted and measured", "measured, ms", "predicted, ms", [*series, equal])


def filled(page: str, document: dict[str, Any]) -> str:
    """Return the page with a table from these results."""
    text = f"{_BEGIN}\n\n{table(document)}\n\n![Predicted over measured TTFT](plots/{PLOT.name})\n\n{_END}"
    return re.sub(f"{_BEGIN}.*?{_END}", lambda _: text, page, flags=re.DOTALL)


def _pairs(document: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return [row for row in document["results"] if row["kind"] == "changed"]


def _by_others(document: dict[str, Any]) -> str:
    share = document["cpu_share_of_other_programs"]
    return "" if share is None else f"Other programs used {share:.0%} of the processors' time meanwhile."


def main() -> int:
    """Write the page and the plot."""
    document = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(filled(PAGE.read_text("utf-8"), document), "utf-8")
    PLOT.write_text(plot(document), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
