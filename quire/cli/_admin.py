"""What the commands for operators share: the channel, and workers as text."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import grpc

from quire import _calls
from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire.cli._connection import add_tls, credentials
from quire.cli._parser import Namespace, OneLineParser

TIMEOUT_S = 10.0


def add_target(parser: OneLineParser) -> None:
    """Adds the flag that says where the service is."""
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="gRPC address of the service")
    add_tls(parser)


@contextmanager
def admin_stub(options: Namespace) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    """The operator API of the service that the flags say; its errors become Quire's."""
    secure = credentials(options)
    target = options.target
    with grpc.insecure_channel(target) if secure is None else grpc.secure_channel(target, secure) as channel:
        try:
            yield admin_pb2_grpc.AdminServiceStub(channel)
        except grpc.RpcError as error:
            raise _calls.read_error(error) from None


def print_workers(workers: Iterable[admin_pb2.Worker]) -> None:
    """A line for each worker."""
    print(f"{'worker':<24} {'state':<9} {'running':>7} {'in flight':>9} {'free':>8} {'cached':>8} {'blocks':>8}")
    for worker in workers:
        state = "draining" if worker.draining else "serving"
        print(
            f"{worker.worker_id:<24} {state:<9} {worker.running_requests:>7} {worker.plans_in_flight:>9}"
            f" {worker.free_blocks:>8} {worker.cached_blocks:>8} {worker.total_blocks:>8}"
        )
