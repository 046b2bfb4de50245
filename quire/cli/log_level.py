"""Changes how much all processes of a running service write into their logs, until its scheduler ends.

Scheduler, front ends and workers start at "info". At "debug" they also tell of what each request meets on its way.
"""

from quire.admin.v1 import admin_pb2
from quire.cli._admin import admin_stub
from quire.cli._connection import add_target, call_options
from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire log-level debug
  quire log-level info --target 10.0.0.5:50051
"""
_LEVELS = {
    "debug": admin_pb2.LOG_LEVEL_DEBUG,
    "info": admin_pb2.LOG_LEVEL_INFO,
    "warning": admin_pb2.LOG_LEVEL_WARNING,
    "error": admin_pb2.LOG_LEVEL_ERROR,
}


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    parser.add_argument("level", choices=list(_LEVELS), help="lines below this level are left out")
    add_target(parser)


def run(options: Namespace) -> int:
    """Changes the level and prints it with the one before."""
    request = admin_pb2.SetLogLevelRequest(level=_LEVELS[options.level])
    with admin_stub(options) as stub:
        response = stub.SetLogLevel(request, **call_options())
    before = next((name for name, level in _LEVELS.items() if level == response.previous), "unknown")
    print(f"log level {options.level}, before {before}")
    return 0
