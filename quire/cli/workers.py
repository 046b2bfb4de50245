"""Lists the usable workers of a running service: what they run, and how their KV blocks are used."""

from quire.admin.v1 import admin_pb2
from quire.cli._admin import admin_stub, print_workers
from quire.cli._connection import add_target, call_options
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
        print_workers(stub.ListWorkers(admin_pb2.ListWorkersRequest(), **call_options()).workers)
    return 0
