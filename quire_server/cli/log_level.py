"""Changes the log level of all processes of a running service, until its scheduler ends.

Scheduler, front ends and workers start at "info". At "debug" they also log the events of each request.
"""

from quire.admin.v1 import admin_pb2
from quire_server.cli._admin import admin_stub
from quire_server.cli._connection import add_target, call_options
from quire_server.cli._parser import Namespace, OneLineParser

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
    """Add the flags."""
    parser.add_argument("level", choices=list(_LEVELS), help="lowest level that is logged")
    add_target(parser)


def run(options: Namespace) -> int:
    """Change the level; print the new and the previous level."""
    request = admin_pb2.SetLogLevelRequest(level=_LEVELS[options.level])
    with admin_stub(options) as stub:
        response = stub.SetLogLevel(request, **call_options())
    before = next((name for name, level in _LEVELS.items() if level == response.previous), "unknown")
    print(f"log level {options.level}, before {before}")
    return 0
