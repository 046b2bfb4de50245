"""The ranks of one worker, and collectives among them: gloo for tensors on CPUs, NCCL for tensors on GPUs.

Ranks that a worker has started on its own machine add up float32 tensors through shared memory: a step on a CPU has two
sums per layer, and a sum over sockets wakes several threads.

All ranks must call the same methods in the same order with tensors of the same shapes. A collective fails as soon as
the connection to another rank breaks, and at the latest after `TIMEOUT_S`. No rank can continue after that.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kernels.native.shared_sum import SharedSum
from shared.config import ConfigError
from shared.logging import get_logger
from worker_svc.ranks.shard import Shard

TIMEOUT_S = 120.0
"""Longest wait for other ranks in a collective."""
START_TIMEOUT_S = 900.0
"""Longest wait for other ranks at the start, while each of them reads its weights."""
RENDEZVOUS = "QUIRE_RENDEZVOUS_FILE"
"""Variable with the path of a file through which ranks on one machine meet; else MASTER_ADDR and MASTER_PORT."""


class RankLostError(Exception):
    """Another rank of this worker was lost, so the worker ends."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place among its worker's ranks."""

    shard: Shard
    local_rank: int = 0
    """Number among the ranks of this machine, which chooses the GPU."""
    local_size: int = 1
    """Number of ranks on this machine, which share its cores."""


def place_of(tensor_parallel_size: int, environ: Mapping[str, str]) -> Place:
    """Return the place given by torchrun's variables, which are ignored without tensor parallelism.

    Raises:
        ConfigError: the variables are incomplete or do not match the setting.
    """
    if tensor_parallel_size == 1:
        return Place(Shard())
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        local_rank, local_size = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    except (KeyError, ValueError) as error:
        raise ConfigError(f"tensor_parallel_size: the variable {error} is missing or not a number; set it") from None
    if size != tensor_parallel_size or not 0 <= rank < size:
        raise ConfigError(
            f"tensor_parallel_size: {tensor_parallel_size} does not match rank {rank} of {size} (RANK, WORLD_SIZE);"
            " start tensor_parallel_size ranks"
        )
    return Place(Shard(rank, size), local_rank, local_size)


class Group:
    """One worker's ranks; by default one rank, for which every collective does nothing."""

    def __init__(
        self,
        shard: Shard | None = None,
        processes: dist.ProcessGroup | None = None,
        shared_sum: SharedSum | None = None,
    ) -> None:
        """Create a group.

        Args:
            shard: this rank's place; None if it is the only rank.
            processes: the ranks, for torch; None for torch's default group.
            shared_sum: adds up float32 tensors on CPUs; None: `processes` does.
        """
        self.shard = shard or Shard()
        self._processes = processes
        self._shared_sum = shared_sum

    @property
    def rank(self) -> int:
        """Number of this rank; rank 0 has the link."""
        return self.shard.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.shard.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a contiguous tensor over all ranks, in place, and return it."""
        if self.size == 1 or not tensor.numel():
            return tensor
        if self._shared_sum is not None and tensor.dtype == torch.float32 and tensor.device.type == "cpu":
            self._shared_sum.add_up(tensor, TIMEOUT_S)
        else:
            dist.all_reduce(tensor, group=self._processes)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, `[size, *shape]`."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self._processes)
        return torch.stack(found)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks on rank 0, and no tensor on the others."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        dist.gather(tensor, found or None, group=self._processes, group_dst=0)
        return found

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite a contiguous tensor with that of rank 0, and return it."""
        if self.size > 1:
            dist.broadcast(tensor, group=self._processes, group_src=0)
        return tensor

    def least(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the least of each number over all ranks."""
        if self.size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._processes)
        return tuple(tensor.tolist())

    def agrees(self, own: bool) -> bool:
        """Return whether `own` is true on all ranks."""
        (all_agree,) = self.least((int(own),))
        return bool(all_agree)


def join(place: Place, device: torch.device) -> Group:
    """Wait until all ranks have started, and return their group.

    Raises:
        RankLostError: a rank did not start.
    """
    if place.shard.size == 1:
        return Group()
    file = os.environ.get(RENDEZVOUS)
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{file}" if file else "env://",
            rank=place.shard.rank,
            world_size=place.shard.size,
            timeout=timedelta(seconds=START_TIMEOUT_S),
        )
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"the ranks cannot connect: {_one_line(error)}") from None
    return Group(place.shard)


def meet(group: Group, device: torch.device) -> Group:
    """Wait until all ranks have loaded their weights, and return the group for steps, with a shorter timeout.

    Raises:
        RankLostError: a rank ended.
    """
    if group.size == 1:
        return group
    try:
        shared_sum = _share_sums(group) if device.type == "cpu" else None
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        processes = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_S))
    except RuntimeError as error:
        raise RankLostError(f"a rank ended while it loaded the model: {_one_line(error)}") from None
    return Group(group.shard, processes, shared_sum)


def _share_sums(group: Group) -> SharedSum | None:
    """Return shared memory for ranks on one machine; None unless it is available to all of them.

    The file is removed as soon as all ranks have opened it, so that it does not outlive them.
    """
    rendezvous = os.environ.get(RENDEZVOUS)
    if rendezvous is None:
        group.least((0,))
        return None
    memory = Path("/dev/shm")
    file = (memory if memory.is_dir() else Path(rendezvous).parent) / f"quire-{Path(rendezvous).parent.name}"
    shared_sum = None
    try:
        if group.rank == 0:
            SharedSum.create(file, group.size)
    except OSError as error:
        get_logger().info("shared memory unavailable; ranks communicate through sockets", reason=str(error))
    group.least((0,))  # After this collective, the file exists or will never exist.
    with contextlib.suppress(OSError):
        shared_sum = SharedSum(file, group.rank, group.size)
    (all_have_it,) = group.least((int(shared_sum is not None),))
    if group.rank == 0:
        file.unlink(missing_ok=True)
    return shared_sum if all_have_it else None


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
