"""Frames per second of the console in headless Chromium, without a GPU, at 50 steps per second.

    python -m tests.console.frames --json frames.json

Batches with 8 and with 1,000 rows are shown in turn. Keep the machine idle otherwise.
"""

import argparse
import itertools
import json
import os
import statistics
from pathlib import Path

from tests.console.big_batch import big_batch
from tests.console.browser import opened, until

WARM_MS, MEASURED_MS = 6_000, 8_000
FRAMES = "since => quire.frames.filter(each => each >= since).map(each => each - since)"


def measure(num_rows: int) -> dict[str, float]:
    """Return the frames per second of a page that shows a batch, the longest frame, and the number of skipped steps."""
    with big_batch(num_rows) as address, opened(address) as page:
        until(page, "quire.gantt.steps?.count > 100")
        page.wait_for_timeout(WARM_MS)
        dropped, since = page.evaluate("quire.model.dropped"), page.evaluate("performance.now()")
        page.wait_for_timeout(MEASURED_MS)
        times = page.evaluate(FRAMES, since)
        missed = page.evaluate("quire.model.dropped") - dropped
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return {
        "rows": num_rows,
        "frames_per_s": round(1000 * len(gaps) / sum(gaps), 1),
        "p99_frame_ms": round(statistics.quantiles(gaps, n=100)[-1], 1),
        "dropped_steps": missed,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [measure(rows) for _ in range(options.rounds) for rows in (8, 1000)]
    for each in results:
        print(each)
    if options.json is not None:
        options.json.write_text(json.dumps({"load_average": os.getloadavg(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
