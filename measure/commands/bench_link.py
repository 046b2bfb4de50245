"""Measures how long workers wait for plans: the real scheduler process and real ZeroMQ, with echo workers.

Echo workers implement the plan protocol and simulate a step of --step-ms. Without --workers, --rows, --burst and
--step-ms the cases are: 256 rows at 5 ms and 1 ms with one and two plans in flight; and, with two plans in flight, 64
workers at 20 ms with 256 rows, with 64 rows, and with 64 rows during a burst of 2,000 requests. Every case is measured
--rounds times in turn. The table shows medians, and the range of the share of time that workers wait. The processes
share the machine's cores, so on a busy machine the waits are upper bounds. All cases take about five minutes, most of
it until the 16,384 requests of 64 workers run.
"""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from measure.scheduler.link import LinkResult

EXAMPLES = """
  quire bench link --json link.json
  quire bench link --workers 64 --step-ms 20
  quire bench link --workers 64 --rows 64 --burst 2000
  quire bench link --workers 64 --rows 64 --standby
  quire bench link --rounds 1 --seconds 1
"""

_HEADER = (
    f"{'workers':>7}{'rows':>6}{'burst':>7}{'step ms':>9}{'in flight':>11}{'steps/s':>10}{'wait':>9}"
    f"  {'range':<18}{'worst':>8}"
    f"{'late µs':>9}{'tokens/s':>11}{'CPU µs/step':>13}{'turn ≤ ms':>11}"
)


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the result to this file")
    add("--rounds", type=int, default=3, metavar="N", help="rounds of measurements (default: 3)")
    add("--seconds", type=float, default=3.0, metavar="S", help="duration of each measurement, in seconds (default: 3)")
    add("--rows", type=int, metavar="N", help="decoding rows per worker (default: 256)")
    add("--workers", type=int, metavar="N", help="number of echo workers (default: 1)")
    add(
        "--burst",
        type=int,
        metavar="N",
        help="number of requests that arrive at once during the measurement (default: 0)",
    )
    add(
        "--step-ms",
        type=float,
        metavar="MS",
        help="simulated duration of a step, in milliseconds (default: 5 and 1; several workers: 20)",
    )

    add(
        "--standby",
        action="store_true",
        help="measure without a journal, with a journal of all requests, and with a standby that mirrors the journal",
    )


def run(options: Namespace) -> int:
    for name in ("rounds", "seconds", "rows", "workers", "burst", "step_ms"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise CommandError(f"--{name.replace('_', '-')}: {value} is too small; use a larger number")

    from measure.scheduler.link import LinkBenchError, as_json, cases_for, run_rounds
    from quire_server.serve.layout import child_environment
    from quire_server.serve.runtime_dir import runtime_dir

    with runtime_dir() as folder:
        try:
            results = run_rounds(
                cases_for(
                    workers=options.workers,
                    rows=options.rows,
                    step_ms=options.step_ms,
                    burst=options.burst,
                    standby=options.standby,
                ),
                rounds=options.rounds,
                seconds=options.seconds,
                folder=folder,
                environment=child_environment(os.environ, os.getpid()),
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
        except LinkBenchError as error:
            raise CommandError(str(error)) from None
    _print_table(results)
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(results), indent=1) + "\n", "utf-8")
    return 0


def _print_table(results: "list[LinkResult]") -> None:
    print("wait: share of time that all workers wait for a plan; worst: the same for the worker that waits longest;")
    print("late: delay from the end of a step to its result; CPU: CPU time of the scheduler process;")
    print("turn: longest turn of the scheduler's loop\n")
    print(_HEADER)
    for each in results:
        spread = f"{each.worker_wait_share_min:.2%} .. {each.worker_wait_share_max:.2%}"
        print(
            f"{each.workers:>7}{each.rows:>6}{each.burst:>7}{each.step_ms:>9g}{each.in_flight:>11}{each.steps_per_s:>10.1f}"
            f"{each.worker_wait_share:>9.2%}  {spread:<18}{each.worst_worker_wait_share:>8.2%}"
            f"{each.late_us_p50:>9.0f}{each.tokens_per_s:>11.0f}{each.scheduler_cpu_us_per_step:>13.0f}{each.longest_turn_ms:>11g}"
        )
    print("\nparts of a turn: µs per step, with the longest time in one turn in ms; CPU of threads: µs per step")
    for each in results:
        kind = ", standby" if each.standby else ", journal" if each.journal else ""
        print(
            f"\n{each.workers} workers, {each.rows} rows, {each.step_ms:g} ms{kind}; {each.worst_worker} waits longest"
        )
        parts = sorted(each.part_us_per_step.items(), key=lambda part: -part[1])
        print("  parts: " + ", ".join(f"{name} {us:g} (≤ {each.longest_part_ms[name]:g})" for name, us in parts))
        print("  threads: " + ", ".join(f"{name} {us:g}" for name, us in each.thread_cpu_us_per_step.items()))
