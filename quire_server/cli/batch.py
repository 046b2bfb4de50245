"""Sends the requests of a file to a running service and writes the answers to another file, one JSON object per line.

Requests are in OpenAI's batch form or in a simple one:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"id": "a", "prompt": "Once upon a time", "max_tokens": 64}

The answers carry the same ids, in the order of completion. After an interruption, by Ctrl-C or a crash, the same
command continues: the file contains exactly one answer per request. A request that the server rejects for good is
answered with its error; the exit code is then 1.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.cli._connection import add_http_target, http_server
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from quire_server.batch.runner import Progress

EXAMPLES = """
  quire batch requests.jsonl answers.jsonl
  quire batch requests.jsonl answers.jsonl --concurrency 64 --target 10.0.0.5:8000
  QUIRE_TARGET=http://10.0.0.5:8000 quire batch requests.jsonl answers.jsonl
"""
_PRINT_EVERY_S = 0.2
"""Interval of progress updates on a terminal, seconds."""
_PRINT_FILE_EVERY_S = 10.0
"""Interval of progress lines elsewhere, seconds."""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    parser.add_argument("requests", type=Path, help="file of requests, one JSON object per line")
    parser.add_argument(
        "answers",
        type=Path,
        help="file of answers; the answers of an interrupted run are kept and the rest is appended",
    )
    add = parser.add_argument
    add_http_target(parser)
    add("--concurrency", type=int, default=32, metavar="N", help="maximum number of requests in flight (default: 32)")
    add("--timeout", type=float, metavar="S", help="deadline of each request, in seconds")
    add(
        "--patience",
        type=float,
        default=120.0,
        metavar="S",
        help="stop after this many seconds without a successful request (default: 120)",
    )
    add("--quiet", action="store_true", help="print no progress")


def run(options: Namespace) -> int:
    """Run the rest of the batch."""
    from quire_server.batch.jobs import BatchError, read_ids, read_jobs
    from quire_server.batch.journal import Journal
    from quire_server.batch.runner import Progress, Runner

    if options.concurrency < 1:
        raise CommandError(f"--concurrency: {options.concurrency} is too small; use at least 1")
    if options.requests.resolve() == options.answers.resolve():
        raise CommandError("answers: this is the requests file; use another file")
    try:
        ids = read_ids(options.requests)
        with Journal(options.answers) as journal:
            unknown = journal.done.difference(ids)
            if unknown:
                raise BatchError(
                    f"{options.answers}: contains an answer to {unknown.pop()!r}, which is not in this batch;"
                    " name another file"
                )
            progress = Progress(total=len(ids), done=len(journal.done))
            printer = _ProgressPrinter(progress, quiet=options.quiet)
            runner = Runner(
                http_server(options),
                journal,
                progress,
                concurrency=min(options.concurrency, max(len(ids) - len(journal.done), 1)),
                patience_s=options.patience,
                timeout_s=options.timeout,
                on_progress=printer.update,
                on_problem=printer.unreachable,
            )
            with contextlib.closing(printer):
                runner.run(read_jobs(options.requests))
    except BatchError as error:
        raise CommandError(f"{error}") from None
    if progress.failed:
        print(
            f"quire batch: {progress.failed} of {progress.total} requests failed; see their errors in the answers",
            file=sys.stderr,
        )
    return 1 if progress.failed else 0


class _ProgressPrinter:
    """Prints progress to stderr: one changing line on a terminal, an occasional line elsewhere."""

    def __init__(self, progress: "Progress", *, quiet: bool) -> None:
        self._progress = progress
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._begun = progress.done
        self._last_print = time.monotonic()

    def update(self) -> None:
        """Print the progress if the interval has passed."""
        now = time.monotonic()
        if not self._quiet and now - self._last_print > (_PRINT_EVERY_S if self._terminal else _PRINT_FILE_EVERY_S):
            self._last_print = now
            self._write()

    def unreachable(self, problem: str) -> None:
        """Print why the run makes no progress."""
        if not self._quiet:
            begin = "\r\x1b[K" if self._terminal else ""
            sys.stderr.write(f"{begin}quire batch: {problem}; trying again\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Print the final progress, unless nothing was done and an error follows."""
        if not self._quiet and (self._progress.done > self._begun or self._progress.done == self._progress.total):
            self._write()
            if self._terminal:
                sys.stderr.write("\n")

    def _write(self) -> None:
        line = self._progress.line()
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        sys.stderr.flush()
