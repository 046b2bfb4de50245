"""Shows live statistics of a running service: requests, tokens, latencies, and each worker's KV blocks and steps.

Rates and latencies are those since the last update. Ctrl-C ends it.
"""

import http.client
import sys
import time
from typing import TYPE_CHECKING

from quire_server.cli._connection import add_http_target, http_server
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.http_client import Server, problem_of, read_object

if TYPE_CHECKING:
    from quire_server.scrape import Scrape

EXAMPLES = """
  quire top
  quire top --every 5 --target 10.0.0.5:8000
  quire top --once                                one reading, for a file
"""
_TIMEOUT_S = 10.0
_FRESH_SCREEN = "\x1b[H\x1b[J"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add_http_target(parser)
    add("--every", type=float, default=1.0, metavar="S", help="seconds between two updates (default: 1)")
    add("--once", action="store_true", help="print the statistics once and exit")


def run(options: Namespace) -> int:
    """Draw the screen until interrupted."""
    from quire_server.cli._top_view import render

    if not options.every > 0:
        raise CommandError(f"--every: {options.every:g} is too small; give a number > 0")
    server = http_server(options)
    before, then = _read(server), time.monotonic()
    screen = sys.stdout.isatty() and not options.once
    if screen:
        sys.stdout.write(_OTHER_SCREEN)
    try:
        while True:
            time.sleep(options.every)
            now, moment = _read(server), time.monotonic()
            lines = render(before, now, moment - then, server.address)
            sys.stdout.write((_FRESH_SCREEN if screen else "") + "\n".join(lines) + "\n")
            sys.stdout.flush()
            if options.once:
                return 0
            before, then = now, moment
    finally:
        if screen:
            sys.stdout.write(_FIRST_SCREEN)
            sys.stdout.flush()


def _read(server: Server) -> "Scrape":
    """Return the current metrics.

    Raises:
        CommandError: the server does not answer, or is not a Quire server.
    """
    from quire_server.scrape import Scrape, parse

    connection = server.connect(_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers=dict(server.headers))
        response = connection.getresponse()
        status, body = response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"{server.address}: {server.failure(error).description}") from None
    finally:
        connection.close()
    if status != http.HTTPStatus.OK:
        raise CommandError(f"{server.address}: {problem_of(status, read_object(body))}")
    try:
        scrape = parse(body.decode())
    except ValueError:
        scrape = Scrape()
    if not scrape.is_quire:
        raise CommandError(f"{server.address}: {problem_of(status, {})}")
    return scrape
