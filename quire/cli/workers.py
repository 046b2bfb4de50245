"""Lists the usable workers of a running service: what they run, and how their KV blocks are used."""

from quire._calls import call_metadata
from quire.admin.v1 import admin_pb2
from quire.cli._admin import TIMEOUT_S, add_target, admin_stub, print_workers
from quire.cli._connection import token
from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire workers
  quire workers --target 10.0.0.5:50051
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    add_target(parser)


def run(options: Namespace) -> int:
    """Prints the table."""
    with admin_stub(options) as stub:
        print_workers(
            stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=TIMEOUT_S, metadata=call_metadata(token())).workers
        )
    return 0
