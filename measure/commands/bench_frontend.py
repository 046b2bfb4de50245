"""Measures the front end alone, with an echo core: messages and tokens per second, memory, stalled readers.

A bare grpc.aio echo server in the same run is the baseline. Prints a table; takes about a minute.
"""

import dataclasses
from pathlib import Path

from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire bench frontend --json frontend.json
  quire bench frontend --rounds 1 --seconds 0.5
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags. Omitted flags take the benchmark's defaults."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the result to this file")
    add("--rounds", type=int, metavar="N", help="rounds of measurements")
    add("--seconds", type=float, metavar="S", help="duration of each measurement, in seconds")
    add(
        "--stalled-seconds", type=float, metavar="S", help="seconds during which memory is measured while readers stall"
    )
    add("--stalled-streams", type=int, metavar="N", help="number of streams whose readers read nothing")


def run(options: Namespace) -> int:
    from measure.frontend.frontend import BenchOptions, run_bench

    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(BenchOptions)}
    run_bench(BenchOptions(**{name: value for name, value in given.items() if value is not None}))
    return 0
