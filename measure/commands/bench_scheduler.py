"""Measures the scheduler's CPU time per step: the real core and codecs without sockets, with synthetic results.

Scenarios: `steady` (all rows decode), `churn` (8 requests end and 8 arrive in every step), `queued` (churn with 100,000
waiting requests, for each policy), `tenants` (churn with one waiting request of each of 10,000 tenants, under `fair`),
`burst` (2,000 requests arrive at 64 idle workers, under `fcfs` and `balanced`). Every scenario runs several times in
turn. The table shows the median of each number and the range of the totals. Columns: "to plan" is the time from a
result to the next plan. "admission" is the time to queue a request. "admit" is the time to assign a row, per admitted
request. "longest" is the longest plan.
"""

import json
import statistics
from pathlib import Path

from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire bench scheduler --json scheduler.json
  quire bench scheduler --rounds 1 --steps 100 --queued 1000
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of measurements (default: 3)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="measured steps per run (default: 400)")
    parser.add_argument(
        "--queued", type=int, default=100_000, metavar="N", help="number of waiting requests (default: 100000)"
    )


def run(options: Namespace) -> int:
    """Run the scenarios, print the table and write the file."""
    from measure.scheduler.core import CoreResult, as_json, median_of, run_all
    from scheduler_svc.collector import tune_collector

    tune_collector()
    rounds: list[list[CoreResult]] = [run_all(options.steps, options.queued) for _ in range(options.rounds)]
    results = [median_of(repeated) for repeated in zip(*rounds, strict=True)]
    header = (
        "scenario", "policy", "rows", "queued", "plan", "commit", "to plan", "total", "p99", "admission", "admit",
        "p99", "longest", "total: range",
    )  # fmt: skip
    print("microseconds per step, medians of the rounds\n")
    print("{:<9}{:<9}{:>5}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>10}{:>8}{:>8}{:>9}  {}".format(*header))
    for result, repeated in zip(results, zip(*rounds, strict=True), strict=True):
        totals = [each.total_us_p50 for each in repeated]
        print(
            f"{result.scenario:<9}{result.policy:<9}{result.rows:>5}{result.queued:>7}{result.plan_us_p50:>9.1f}"
            f"{result.commit_us_p50:>9.1f}{result.answer_to_plan_us_p50:>9.1f}{statistics.median(totals):>9.1f}"
            f"{result.total_us_p99:>9.1f}{result.admission_us_p50:>10.1f}{result.admit_us_p50:>8.1f}"
            f"{result.admit_us_p99:>8.1f}{result.longest_plan_us:>9.1f}  {min(totals):.1f} .. {max(totals):.1f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(results), indent=1) + "\n", "utf-8")
    return 0
