"""Code shared by the operator commands: the stub, and the table of workers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quire.admin.v1 import admin_pb2, admin_pb2_grpc
from quire_server.cli._connection import connected
from quire_server.cli._parser import Namespace


@contextmanager
def admin_stub(options: Namespace) -> Iterator[admin_pb2_grpc.AdminServiceStub]:
    """Connect to the operator API at the address in the flags; convert gRPC errors to `QuireError`."""
    with connected(options) as channel:
        yield admin_pb2_grpc.AdminServiceStub(channel)


def print_workers(workers: Iterable[admin_pb2.Worker]) -> None:
    print(
        f"{'worker':<24} {'state':<9} {'running':>7} {'in flight':>9} {'free':>8} {'cached':>8} {'blocks':>8}"
        f" {'pid':>7} device"
    )
    for worker in workers:
        state = "draining" if worker.draining else "serving"
        print(
            f"{worker.worker_id:<24} {state:<9} {worker.running_requests:>7} {worker.plans_in_flight:>9}"
            f" {worker.free_blocks:>8} {worker.cached_blocks:>8} {worker.total_blocks:>8}"
            f" {worker.pid:>7} {worker.device}"
        )
