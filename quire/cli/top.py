"""Shows a running service as it works: requests, tokens, latencies, and each worker's KV blocks and steps.

Ctrl-C ends it. Rates and latencies are those since the screen was drawn last.
"""

import ssl
import sys
import time
import urllib.error
import urllib.request

from quire.cli._connection import add_http_target, http_headers, tls_context
from quire.cli._errors import CommandError
from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire top
  quire top --every 5 --target 10.0.0.5:8000
  quire top --once                                one reading, for a file
"""
_TIMEOUT_S = 10.0
_FRESH_SCREEN = "\x1b[H\x1b[J"
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add_http_target(parser)
    add("--every", type=float, default=1.0, metavar="S", help="seconds between two readings (default: 1)")
    add("--once", action="store_true", help="print one reading and end")


def run(options: Namespace) -> int:
    """Draws until interrupted."""
    from quire.cli._top_view import parse, render

    if not options.every > 0:
        raise CommandError("--every: give a number above 0")
    address, tls = options.target, tls_context(options)
    before, then = parse(_read(address, tls)), time.monotonic()
    screen = sys.stdout.isatty() and not options.once
    if screen:
        sys.stdout.write(_OTHER_SCREEN)
    try:
        while True:
            time.sleep(options.every)
            now, moment = parse(_read(address, tls)), time.monotonic()
            lines = render(before, now, moment - then, address)
            sys.stdout.write((_FRESH_SCREEN if screen else "") + "\n".join(lines) + "\n")
            sys.stdout.flush()
            if options.once:
                return 0
            before, then = now, moment
    finally:
        if screen:
            sys.stdout.write(_FIRST_SCREEN)
            sys.stdout.flush()


def _read(address: str, tls: ssl.SSLContext | None) -> str:
    request = urllib.request.Request(
        f"{'http' if tls is None else 'https'}://{address}/metrics", headers=http_headers()
    )
    try:
        # Straight there, whatever proxy the environment names for the outside.
        handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)]
        with urllib.request.build_opener(*handlers).open(request, timeout=_TIMEOUT_S) as response:
            text: str = response.read().decode()
            return text
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise CommandError(f"{address} does not answer ({reason}); --target names the HTTP address") from None
