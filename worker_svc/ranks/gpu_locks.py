"""Orders the start of workers on the same GPUs: one lock per GPU, held while a worker starts.

A starting worker then sees how much memory the earlier ones have left. A worker's ranks take their locks one after the
other, in the same order for all workers. Two workers that start on the same GPUs therefore cannot deadlock.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import gettempdir

import torch

from shared.config import ConfigError
from shared.logging import get_logger
from worker_svc.ranks.group import Group, RankLostError


@contextmanager
def alone_on(device: torch.device, group: Group) -> Iterator[None]:
    """Wait until no other worker of this user is starting on the group's GPUs, and block others within the context.

    All ranks in the group call this, each with its own device. Ranks on a CPU take no lock.

    Raises:
        ConfigError: two ranks have the same GPU.
        RankLostError: another rank ended while this one waited.
    """
    if device.type == "cpu":
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    with held_in_order(Path(gettempdir()) / f"quire-{os.getuid()}-gpu-{uuid}.lock", group):
        yield


@contextmanager
def held_in_order(lock: Path, group: Group) -> Iterator[None]:
    """Hold this rank's lock, and enter the context when all ranks hold theirs; see `alone_on`."""
    mine = hashlib.sha256(lock.name.encode()).digest()
    with ExitStack() as held:
        try:
            names = [bytes(each) for each in group.all_gather(torch.tensor(list(mine), dtype=torch.uint8)).tolist()]
            if len(set(names)) < len(names):
                raise ConfigError(
                    "device: two ranks have the same GPU; set LOCAL_RANK to the number of each rank on its machine"
                )
            for name in sorted(names):
                if name == mine:
                    held.enter_context(locked(lock))
                group.least((0,))  # Ranks take their locks one after the other.
        except RuntimeError as error:
            raise RankLostError(f"a rank ended while the worker waited for its GPUs: {error}") from None
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock; create the file if it does not exist. The process's exit releases the lock at the latest."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            get_logger().info("waiting for another worker that starts on this GPU", lock=str(path))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
