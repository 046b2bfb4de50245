"""Sends the requests of a file to a running service and writes the answers to another, one JSON object per line.

Requests are in OpenAI's batch form or in a simple one:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}
  {"id": "a", "prompt": "Once upon a time", "max_tokens": 64}

The answers have the same ids, in the order in which they were ready. Interrupted, by Ctrl-C or a crash, the same
command goes on where it was: every request is answered exactly once in the file. Requests that the server
refuses for good are answered with their error; the exit code is then 1.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli._connection import add_http_target, http_headers, tls_context
from quire.cli._errors import CommandError
from quire.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from quire.batch.runner import Progress

EXAMPLES = """
  quire batch requests.jsonl answers.jsonl
  quire batch requests.jsonl answers.jsonl --concurrency 64 --target 10.0.0.5:8000
"""
_TELL_EVERY_S = 0.2
_TELL_FILE_EVERY_S = 10.0


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    parser.add_argument("requests", type=Path, help="the file of requests, JSON lines")
    parser.add_argument("answers", type=Path, help="the file of answers; one from an interrupted run is gone on with")
    add = parser.add_argument
    add_http_target(parser)
    add("--concurrency", type=int, default=32, metavar="N", help="requests under way at once (default: 32)")
    add("--timeout", type=float, metavar="S", help="deadline of each request, seconds")
    add(
        "--patience",
        type=float,
        default=120.0,
        metavar="S",
        help="give up after so long without success (default: 120)",
    )
    add("--quiet", action="store_true", help="tell nothing about the progress")


def run(options: Namespace) -> int:
    """Runs what is left of the batch."""
    from quire.batch.jobs import BatchError, read_ids, read_jobs
    from quire.batch.journal import Journal
    from quire.batch.runner import Progress, Runner, Server

    if options.concurrency < 1:
        raise CommandError("--concurrency: give at least 1")
    if options.requests.resolve() == options.answers.resolve():
        raise CommandError("requests and answers are one file; name another for the answers")
    try:
        ids = read_ids(options.requests)
        with Journal(options.answers) as journal:
            strangers = journal.done.difference(ids)
            if strangers:
                raise BatchError(f"{options.answers}: answers {strangers.pop()!r}, which is no request of this batch")
            progress = Progress(total=len(ids), done=len(journal.done))
            teller = _Teller(progress, quiet=options.quiet)
            runner = Runner(
                Server(options.target, tls_context(options), http_headers()),
                journal,
                progress,
                concurrency=min(options.concurrency, max(len(ids) - len(journal.done), 1)),
                patience_s=options.patience,
                timeout_s=options.timeout,
                on_progress=teller.tell,
            )
            with contextlib.closing(teller):
                runner.run(read_jobs(options.requests))
    except BatchError as error:
        raise CommandError(f"{error}") from None
    if progress.failed:
        print(
            f"quire batch: {progress.failed} of {progress.total} failed; their errors are in the file", file=sys.stderr
        )
    return 1 if progress.failed else 0


class _Teller:
    """Tells on stderr how far the batch is: one line that changes on a terminal, a line now and then elsewhere."""

    def __init__(self, progress: "Progress", *, quiet: bool) -> None:
        self._progress = progress
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._told = time.monotonic()

    def tell(self) -> None:
        """Says it, if it is time."""
        now = time.monotonic()
        if not self._quiet and now - self._told > (_TELL_EVERY_S if self._terminal else _TELL_FILE_EVERY_S):
            self._told = now
            self._write()

    def close(self) -> None:
        """Says it for the last time."""
        if not self._quiet:
            self._write()
            if self._terminal:
                sys.stderr.write("\n")

    def _write(self) -> None:
        line = self._progress.line()
        sys.stderr.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        sys.stderr.flush()
