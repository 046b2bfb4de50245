"""Workers that start on the same GPUs start one after the other, and never wait for each other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shared.config import ConfigError
from worker_svc.ranks.gpu_locks import held_in_order, locked
from worker_svc.ranks.group import Group, RankLostError
from worker_svc.ranks.shard import Shard

PATIENCE_S = 20.0


class Worker:
    """The ranks of one worker as threads, with collectives between them."""

    def __init__(self, size: int) -> None:
        self.values: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE_S)


class ThreadGroup(Group):
    """One rank of a `Worker`."""

    def __init__(self, worker: Worker, rank: int) -> None:
        super().__init__(Shard(rank, len(worker.values)))
        self.worker = worker

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks."""
        self.worker.values[self.rank] = tensor
        self.worker.barrier.wait()
        return torch.stack(self.worker.values)

    def least(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Wait for all ranks; raise an error, like gloo, if one does not arrive."""
        self.worker.barrier.wait()
        return numbers


def test_workers_start_one_after_the_other(tmp_path: Path) -> None:
    """The second begins when the first has taken its memory."""
    events: list[str] = []
    waits = threading.Event()

    def second() -> None:
        waits.set()
        with locked(tmp_path / "gpu.lock"):
            events.append("second")

    with locked(tmp_path / "gpu.lock"):
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(60)
        thread.join(0.2)
        events.append("first")
    thread.join(60)

    assert events == ["first", "second"]


def test_workers_of_several_ranks_take_their_locks_in_one_order(tmp_path: Path) -> None:
    """Two workers start again and again on the same two GPUs, with their ranks the other way round.

    Each rank is alone on its GPU until all ranks of its worker have started.
    """
    locks = [tmp_path / "gpu-a.lock", tmp_path / "gpu-b.lock"]
    on_gpu = {lock: threading.Lock() for lock in locks}

    def start(group: ThreadGroup, lock: Path) -> int:
        for _ in range(50):
            with held_in_order(lock, group):
                assert on_gpu[lock].acquire(blocking=False)
                group.least((0,))  # By now all ranks have loaded the model.
                on_gpu[lock].release()
        return 50

    with ThreadPoolExecutor(4) as ranks:
        starts = [
            ranks.submit(start, ThreadGroup(worker, rank), lock)
            for worker, order in ((Worker(2), locks), (Worker(2), locks[::-1]))
            for rank, lock in enumerate(order)
        ]

    assert [each.result() for each in starts] == [50] * 4


def test_a_rank_that_ends_while_another_waits_ends_the_worker(tmp_path: Path) -> None:
    """The other ranks say so, and release their locks."""
    worker = Worker(2)
    worker.barrier.abort()

    with (
        pytest.raises(RankLostError, match="a rank ended while the worker waited for its GPUs"),
        held_in_order(tmp_path / "gpu.lock", ThreadGroup(worker, 0)),
    ):
        pass
    with locked(tmp_path / "gpu.lock"):
        pass


def test_two_ranks_on_one_gpu_are_refused(tmp_path: Path) -> None:
    """The second rank would wait for the first without end."""
    worker = Worker(2)

    def start(rank: int) -> None:
        with held_in_order(tmp_path / "gpu.lock", ThreadGroup(worker, rank)):
            pass

    with ThreadPoolExecutor(2) as ranks:
        for each in [ranks.submit(start, rank) for rank in range(2)]:
            with pytest.raises(ConfigError, match="device: two ranks have the same GPU; set LOCAL_RANK"):
                each.result()
