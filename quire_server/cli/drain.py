"""Drains a worker of a running service: no new requests start there. `--resume` undoes it.

Running requests finish where they are. With `--move` they continue on other workers at once: they are recomputed from
their tokens, and clients see a pause. Once the worker runs nothing, it may be stopped.
"""

from quire.admin.v1 import admin_pb2
from quire_server.cli._admin import admin_stub, print_workers
from quire_server.cli._connection import add_target, call_options
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire drain worker-1
  quire drain worker-1 --move
  quire drain worker-1 --resume
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    parser.add_argument("worker", help="name of the worker, as `quire workers` lists it")
    parser.add_argument("--move", action="store_true", help="move running requests to other workers at once")
    parser.add_argument("--resume", action="store_true", help="let the worker accept requests again")
    add_target(parser)


def run(options: Namespace) -> int:
    """Drain or resume the worker, and print its state."""
    with admin_stub(options) as stub:
        if options.resume:
            resume = admin_pb2.ResumeWorkerRequest(worker_id=options.worker)
            worker = stub.ResumeWorker(resume, **call_options()).worker
        else:
            drain = admin_pb2.DrainWorkerRequest(worker_id=options.worker, move_requests=options.move)
            worker = stub.DrainWorker(drain, **call_options()).worker
    print_workers([worker])
    return 0
