"""Redraw the plots in docs/scheduling.md: `python -m measure.plots [NAME ...]`."""

import sys
from pathlib import Path

from measure.plots.claims import CLAIMS, victim_table

FOLDER = Path("docs/plots")


def main(names: list[str]) -> int:
    """Draw the named plots, or all."""
    FOLDER.mkdir(exist_ok=True)
    for name in names or CLAIMS:
        (FOLDER / f"{name}.svg").write_text(CLAIMS[name]())
        print(FOLDER / f"{name}.svg", flush=True)
        if name == "victims":
            print(victim_table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
