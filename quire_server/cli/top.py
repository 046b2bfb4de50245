"""Shows what a running service does: the batch of each worker, queues, tokens, latencies, KV blocks and incidents.

The numbers are those of the console, from the same stream of the operator API, so the command needs the rights of an
operator. Ctrl-C ends it. During a takeover, the command waits up to 10 s for the next scheduler.
"""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import grpc

from quire import _calls
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire_server.cli._admin import admin_stub
from quire_server.cli._connection import add_target, token
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from quire_server.cli._top_view import Top

EXAMPLES = """
  quire top
  quire top --every 5 --target 10.0.0.5:50051
  quire top --once                                one reading, for a file
"""
_FRESH_SCREEN = "\x1b[H\x1b[J"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"

_NO_LEADER = "NOT_READY"
"""Reason of the error while no scheduler leads, or the service starts."""
_PATIENCE_S = 10.0
"""Maximum time to wait for a scheduler that leads, seconds."""
_PAUSE_S = 0.25
"""Pause before watching again, if the server suggests none, seconds."""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add_target(parser)
    add("--every", type=float, default=1.0, metavar="S", help="minimum seconds between two updates (default: 1)")
    add("--once", action="store_true", help="print the numbers for one second and exit")


def run(options: Namespace) -> int:
    """Draw the screen until interrupted."""
    if not options.every > 0:
        raise CommandError(f"--every: {options.every:g} is too small; use a number > 0")
    screen = sys.stdout.isatty() and not options.once
    with admin_stub(options) as stub:
        if screen:
            sys.stdout.write(_OTHER_SCREEN)
        try:
            drawn = -float("inf")
            for top in _views(stub, options.target):
                now = time.monotonic()
                if now - drawn < options.every:
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
    return 0


def _views(stub: admin_pb2_grpc.AdminServiceStub, target: str) -> "Iterator[Top]":
    """Yield the numbers at each update. If no scheduler leads, wait for one and watch again.

    Raises:
        grpc.RpcError: the call failed, or no scheduler led for `_PATIENCE_S`.
    """
    from quire_server.cli._top_view import Top

    updated = time.monotonic()
    while True:
        top = Top(target)  # Another scheduler numbers the requests anew.
        parts = stub.WatchSteps(admin_pb2.WatchStepsRequest(tables=True), metadata=_calls.call_metadata(token()))
        try:
            next(parts)  # The first part only confirms that the stream has started.
            for part in parts:
                top.take(part)
                if part.HasField("load") and top.is_complete:
                    yield top
                    updated = time.monotonic()
            return
        except grpc.RpcError as failed:
            error = _calls.read_error(failed)
            pause = error.retry_after_s or _PAUSE_S
            if error.reason != _NO_LEADER or time.monotonic() + pause > updated + _PATIENCE_S:
                raise
        finally:
            parts.cancel()
        time.sleep(pause)
