"""Write the tables and plots in docs/strategies.md from the saved results: `python -m measure.strategies.page`.

The text on the page is written by hand. Only the parts between markers are replaced.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from measure.strategies import report

_ROOT = Path(__file__).resolve().parents[2]
PAGE = _ROOT / "docs" / "strategies.md"
PLOTS = _ROOT / "docs" / "plots"
RESULTS = _ROOT / "measure" / "results" / "strategies.json"


def filled(page: str, document: dict[str, Any]) -> str:
    """Return the page with tables from these results."""
    results = document["results"]
    parts = {
        "origin": report.origin(document),
        "claims": report.markdown_claims(results),
        "runs": report.markdown_table(results),
    }
    for name, table in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n\n{table}\n\n{end}", page, flags=re.DOTALL)  # noqa: B023
    return page


def main() -> int:
    """Write the page and the plots."""
    document = json.loads(RESULTS.read_text("utf-8"))
    PAGE.write_text(filled(PAGE.read_text("utf-8"), document), "utf-8")
    for name, svg in report.plots(document["results"]).items():
        (PLOTS / f"strategies-{name}.svg").write_text(svg, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
