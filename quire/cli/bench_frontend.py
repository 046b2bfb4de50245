"""Measures the front end alone, against an echo core: messages and tokens per second, memory, stalled
readers.

The yardstick is a bare grpc.aio echo in the same run.
"""

from pathlib import Path

from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire bench frontend --json frontend.json
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the result goes (default: stdout)")


def run(options: Namespace) -> int:
    """Runs the benchmark."""
    raise NotImplementedError(options)
