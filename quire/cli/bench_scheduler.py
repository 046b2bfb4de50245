"""Measures what a step costs the scheduler: the real core and codecs without sockets, with synthetic answers.

Scenarios: `steady` (everybody decodes), `churn` (8 requests end and 8 arrive in every step), `queued` (churn with
100,000 requests waiting, for each policy). Every scenario is run several times in turn; the table shows the median of
each figure and its range.
"""

import json
import statistics
from pathlib import Path

from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire bench scheduler --json scheduler.json
  quire bench scheduler --rounds 1 --steps 100 --queued 1000
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often everything is run (default: 3)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="measured steps of each run (default: 400)")
    parser.add_argument("--queued", type=int, default=100_000, metavar="N", help="requests that wait (default: 100000)")


def run(options: Namespace) -> int:
    """Runs the scenarios, prints the table and writes the file."""
    from scheduler_svc.bench.core import CoreResult, as_json, median_of, run_all
    from scheduler_svc.collector import tame_collector

    tame_collector()
    rounds: list[list[CoreResult]] = [run_all(options.steps, options.queued) for _ in range(options.rounds)]
    results = [median_of(repeated) for repeated in zip(*rounds, strict=True)]
    header = ("scenario", "policy", "rows", "queued", "plan", "commit", "total", "p99", "admission", "total: range")
    print("microseconds per step, medians of the rounds\n")
    print("{:<9}{:<10}{:>6}{:>9}{:>9}{:>9}{:>9}{:>9}{:>11}  {}".format(*header))
    for result, repeated in zip(results, zip(*rounds, strict=True), strict=True):
        totals = [each.total_us_p50 for each in repeated]
        print(
            f"{result.scenario:<9}{result.policy:<10}{result.rows:>6}{result.queued:>9}{result.plan_us_p50:>9.1f}"
            f"{result.commit_us_p50:>9.1f}{statistics.median(totals):>9.1f}{result.total_us_p99:>9.1f}"
            f"{result.admission_us_p50:>11.1f}  {min(totals):.1f} .. {max(totals):.1f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(results), indent=1) + "\n")
    return 0
