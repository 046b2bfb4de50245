"""Compares static, dynamic and continuous batching: the same requests on the real engine, with the bundled model.

Each group of runs starts a service of its own on the CPU. Steps, idle slots and the use of blocks come from the flight
record, latencies from the client. Static batching appears in two forms. In `static-held`, Quire's own mode, a finished
request leaves its slot empty until its batch ends. In `static-padded`, finished rows are computed as padding and all
responses arrive at the end of the batch, as with generate() in transformers. Its numbers are computed from the steps of
`static-held`.

The column "bound" is the most that continuous batching can gain over static batching with these lengths: steps of
static batching divided by the fewest possible steps. Each case runs --repeats times, and the fastest run counts. All
cases together take about six minutes on two idle cores. Times measured on a busy machine mean little.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser
from shared.logging import configure_logging

EXAMPLES = """
  quire bench strategies --json strategies.json --html strategies.html
  quire bench strategies --workload 50-100-200-500 --workload half-short
  quire bench strategies --from strategies.json --html strategies.html
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--workload", action="append", metavar="NAME", help="run only this workload; may be repeated (default: all)")
    add(
        "--from", dest="source", type=Path, metavar="FILE", help="read the results of an earlier run instead of running"
    )
    add("--repeats", type=int, default=2, metavar="N", help="runs of each case; the fastest counts (default: 2)")
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--html", type=Path, metavar="FILE", help="write a report with plots to this file")


def run(options: Namespace) -> int:
    """Run the cases, print the table and write the files."""
    from measure.strategies import other_work, report

    if options.repeats < 1:
        raise CommandError(f"--repeats: {options.repeats} is too small; use at least 1")
    if options.source is not None:
        document = json.loads(options.source.read_text("utf-8"))
    else:
        before = other_work.now()
        results = asyncio.run(_measure(options.workload, options.repeats))
        by_others = other_work.share_of_others(before, other_work.now(), os.cpu_count() or 1)
        document = report.document(results, by_others)
    print(report.table(document["results"]))
    if options.json is not None:
        options.json.write_text(report.to_json(document), "utf-8")
    if options.html is not None:
        options.html.write_text(report.html(document), "utf-8")
    return 0


async def _measure(names: list[str] | None, repeats: int) -> list[dict[str, Any]]:
    from measure.strategies.cases import Case, all_cases
    from measure.strategies.measure import grouped, run_cases

    cases = list(all_cases())
    known = list(dict.fromkeys(case.workload.name for case in cases))
    if unknown := set(names or ()) - set(known):
        raise CommandError(f"--workload: unknown workload {sorted(unknown)[0]!r}; use {', '.join(known)}")
    cases = [case for case in cases if names is None or case.workload.name in names]
    configure_logging("quire-bench", level="warning")
    task = asyncio.current_task()
    assert task is not None
    # Stop the service first and then the command, as Ctrl-C does.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    finished = 0

    def done(case: Case) -> None:
        nonlocal finished
        finished += 1
        print(f"{finished}/{len(cases)}  {case.workload.name}: {case.strategy}, {case.slots} slots", file=sys.stderr)

    results = {}
    for group in grouped(cases):
        for case, rows in zip(group, await run_cases(group, done, repeats), strict=True):
            results[cases.index(case)] = rows
    return [row for index in range(len(cases)) for row in results[index]]
