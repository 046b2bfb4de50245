"""Lists the usable workers of a running service, with their load and the use of their KV blocks."""

from quire.admin.v1 import admin_pb2
from quire_server.cli._admin import admin_stub, print_workers
from quire_server.cli._connection import add_target, call_options
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire workers
  quire workers --target 10.0.0.5:50051
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add_target(parser)


def run(options: Namespace) -> int:
    """Print the table."""
    with admin_stub(options) as stub:
        print_workers(stub.ListWorkers(admin_pb2.ListWorkersRequest(), **call_options()).workers)
    return 0
