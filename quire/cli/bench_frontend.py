"""Measures the front end alone, against an echo core: messages and tokens per second, memory, stalled readers.

The yardstick is a bare grpc.aio echo in the same run. Prints a table; takes about a minute.
"""

import dataclasses
from pathlib import Path

from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire bench frontend --json frontend.json
  quire bench frontend --rounds 1 --seconds 0.5
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags; what is left out takes the benchmark's own defaults."""
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="where the result goes")
    add("--rounds", type=int, metavar="N", help="how often everything is measured, in turns")
    add("--seconds", type=float, metavar="S", help="how long each measurement takes")
    add("--stalled-seconds", type=float, metavar="S", help="how long memory is watched while readers stall")
    add("--stalled-streams", type=int, metavar="N", help="streams whose readers take nothing")


def run(options: Namespace) -> int:
    """Runs the benchmark."""
    from services.bench.frontend import BenchOptions, run_bench

    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(BenchOptions)}
    run_bench(BenchOptions(**{name: value for name, value in given.items() if value is not None}))
    return 0
