"""Makes a worker of a running service idle: nothing new starts there. `--resume` undoes it.

Running requests finish where they are, or with `--move` go on elsewhere at once: they are computed again from their
tokens, and clients see a pause. The worker may be stopped when it runs nothing any more.
"""

from quire.admin.v1 import admin_pb2
from quire.cli._admin import admin_stub, print_workers
from quire.cli._connection import add_target, call_options
from quire.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire drain worker-1
  quire drain worker-1 --move
  quire drain worker-1 --resume
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    parser.add_argument("worker", help="the worker's name, as `quire workers` lists it")
    parser.add_argument("--move", action="store_true", help="let running requests go on elsewhere at once")
    parser.add_argument("--resume", action="store_true", help="let the worker take requests again")
    add_target(parser)


def run(options: Namespace) -> int:
    """Drains or resumes, and prints the worker's state."""
    with admin_stub(options) as stub:
        if options.resume:
            resume = admin_pb2.ResumeWorkerRequest(worker_id=options.worker)
            worker = stub.ResumeWorker(resume, **call_options()).worker
        else:
            drain = admin_pb2.DrainWorkerRequest(worker_id=options.worker, move_requests=options.move)
            worker = stub.DrainWorker(drain, **call_options()).worker
    print_workers([worker])
    return 0
