"""Choice of the device, the order of workers that start on one GPU, and the number of CPU threads."""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir

import torch

from kernels.native.library import set_num_threads as native_threads
from shared.config import ConfigError
from shared.logging import get_logger


def choose_device(wanted: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device that the setting names, and make a GPU the current device.

    Rank `local_rank` of this machine's `local_size` ranks takes the GPU that is as many places after the named one.

    Raises:
        ConfigError: the setting is invalid, the device does not exist, or torch's allocator is not supported.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < num_gpus < local_size and not wanted.startswith("cpu"):
        raise ConfigError(
            f"tensor_parallel_size: {local_size} ranks on this machine need a GPU each, and it has {num_gpus}; give"
            " fewer, or --device cpu"
        )
    device = torch.device(name_device(wanted, num_gpus, local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_allocator(torch.cuda.get_allocator_backend())
    return device


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Wait until no other worker of this user starts on the GPU, and keep others waiting within the context.

    A worker that starts then sees how much memory the ones before it have left. A CPU needs no such order.
    """
    if device.type == "cpu":
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    with locked(Path(gettempdir()) / f"quire-{os.getuid()}-gpu-{uuid}.lock"):
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created if it does not exist; the lock ends with the process at the latest."""
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


def check_allocator(backend: str) -> None:
    """Check torch's allocator of GPU memory: graphs use memory that it keeps after they are captured.

    Raises:
        ConfigError: it is not the native one.
    """
    if backend != "native":
        raise ConfigError(
            f"PYTORCH_ALLOC_CONF: the allocator {backend} is not supported, because it releases the memory of captured"
            " graphs; remove backend from this variable and from PYTORCH_CUDA_ALLOC_CONF"
        )


def name_device(wanted: str, num_gpus: int, local_rank: int = 0) -> str:
    """Return the device name, "cpu" or "cuda:N", for a setting on a machine with `num_gpus` GPUs.

    "auto:N" is GPU N modulo the number of GPUs, so that several workers share the GPUs. Without a GPU, "auto" and
    "auto:N" are the CPU. "cuda:N" requires that GPU. N is 0 if it is missing. `local_rank` is added to N.

    Raises:
        ConfigError: the setting is invalid or the GPU does not exist.
    """
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d{1,4}))?", wanted)
    if match is None or wanted.startswith("cpu:"):
        raise ConfigError(f"device: invalid device {wanted!r}; use auto, auto:N, cpu, cuda or cuda:N")
    kind, index = match[1], int(match[2] or 0) + local_rank
    if kind == "auto" and num_gpus:
        return f"cuda:{index % num_gpus}"
    if kind != "cuda":
        return "cpu"
    if index >= num_gpus:
        found = "no GPU" if not num_gpus else "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise ConfigError(f"device: cuda:{index} not found: this machine has {found}; use --device auto or cpu")
    return f"cuda:{index}"


def describe_device(device: torch.device, num_ranks: int = 1) -> str:
    """Return the device's name for the operator: "cpu", "cuda:0 NVIDIA H100", or "2 ranks, cpu" for example."""
    ranks = f"{num_ranks} ranks, " if num_ranks > 1 else ""
    return ranks + ("cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}")


def set_threads(num_threads: int, num_processes: int = 1) -> None:
    """Set the number of threads of torch and of the native CPU kernels.

    0: an equal share of the cores that this process may use with `num_processes` of its kind.
    """
    count = num_threads or max(1, len(os.sched_getaffinity(0)) // num_processes)
    torch.set_num_threads(count)
    native_threads(count)
