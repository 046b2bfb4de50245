"""Check the claims of the articles and write docs/strategies.md.

    python -m measure.claims                                    # everything: about half an hour on two idle cores
    python -m measure.claims --parts windows,latency_limits     # renew these parts only
    python -m measure.claims --parts none                       # only write the page again

The results are in measure/results/claims.json and measure/results/strategies.json. The page and its plots are made from
these files only.
"""

import argparse
import sys

from measure.claims import parts
from measure.claims.page import PAGE, PLOTS, filled
from measure.strategies import report


def main() -> int:
    """Run the parts, and write the results, the page and the plots."""
    parser = argparse.ArgumentParser(
        prog="python -m measure.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="all", help=f"all, none, or some of {', '.join(parts.NAMES)}")
    chosen = parser.parse_args().parts
    names = {"all": list(parts.NAMES), "none": []}.get(chosen, chosen.split(","))
    if unknown := set(names) - set(parts.NAMES):
        parser.error(f"--parts: unknown part {min(unknown)!r}; use all, none or some of {', '.join(parts.NAMES)}")
    results = parts.read()
    for name in names:
        results[name] = parts.run_part(name)
        parts.write(results)
        print(f"{name}: {results[name]['seconds']} s", file=sys.stderr)
    strategies = parts.strategies()
    PAGE.write_text(filled(PAGE.read_text("utf-8"), results, strategies), "utf-8")
    for name, svg in report.plots(strategies["results"]).items():
        (PLOTS / f"strategies-{name}.svg").write_text(svg, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
