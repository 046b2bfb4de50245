"""Shows what a running service does: the batch of each worker, queues, tokens, latencies, KV blocks and incidents.

The numbers are those of the console, from the same stream of the operator API, so the command needs the rights of an
operator. Ctrl-C ends it.
"""

import sys
import time

from quire import _calls
from quire.admin.v1 import admin_pb2
from quire_server.cli._admin import admin_stub
from quire_server.cli._connection import add_target, token
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire top
  quire top --every 5 --target 10.0.0.5:50051
  quire top --once                                one reading, for a file
"""
_FRESH_SCREEN = "\x1b[H\x1b[J"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add_target(parser)
    add("--every", type=float, default=1.0, metavar="S", help="minimum seconds between two updates (default: 1)")
    add("--once", action="store_true", help="print the numbers for one second and exit")


def run(options: Namespace) -> int:
    """Draw the screen until interrupted."""
    from quire_server.cli._top_view import Top

    if not options.every > 0:
        raise CommandError(f"--every: {options.every:g} is too small; use a number > 0")
    top = Top(options.target)
    with admin_stub(options) as stub:
        parts = stub.WatchSteps(admin_pb2.WatchStepsRequest(tables=True), metadata=_calls.call_metadata(token()))
        try:
            next(parts)  # The first part only confirms that the stream has started.
            screen = sys.stdout.isatty() and not options.once
            if screen:
                sys.stdout.write(_OTHER_SCREEN)
            try:
                drawn = -float("inf")
                for part in parts:
                    top.take(part)
                    now = time.monotonic()
                    if not (part.HasField("load") and top.is_complete and now - drawn >= options.every):
                        continue
                    drawn = now
                    sys.stdout.write((_FRESH_SCREEN if screen else "") + "\n".join(top.lines()) + "\n")
                    sys.stdout.flush()
                    if options.once:
                        return 0
            finally:
                if screen:
                    sys.stdout.write(_FIRST_SCREEN)
                    sys.stdout.flush()
        finally:
            parts.cancel()
    return 0
