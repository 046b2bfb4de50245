"""Chooses the device and the number of CPU threads."""

import os
import re

import torch

from kernels.native.library import set_num_threads as native_threads
from shared.config import ConfigError


def choose_device(wanted: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device selected by the setting; if it is a GPU, make it the current device.

    Of the `local_size` ranks on this machine, rank `local_rank` uses the GPU that is `local_rank` places after the
    selected GPU.

    Raises:
        ConfigError: the setting is invalid, the device does not exist, or torch's allocator is not supported.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < num_gpus < local_size and not wanted.startswith("cpu"):
        raise ConfigError(
            f"tensor_parallel_size: {local_size} ranks on this machine need {local_size} GPUs, but it has"
            f" {num_gpus}; use fewer ranks, or --device cpu"
        )
    device = torch.device(name_device(wanted, num_gpus, local_rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        check_allocator(torch.cuda.get_allocator_backend())
    return device


def check_allocator(backend: str) -> None:
    """Check torch's allocator for GPU memory, because graphs depend on its retaining the captured memory.

    Raises: ConfigError: it is not the native allocator.
    """
    if backend != "native":
        raise ConfigError(
            f"PYTORCH_ALLOC_CONF: the allocator {backend} is not supported, because it releases the memory of captured"
            " graphs; remove backend from this variable and from PYTORCH_CUDA_ALLOC_CONF"
        )


def name_device(wanted: str, num_gpus: int, local_rank: int = 0) -> str:
    """Return the device name, "cpu" or "cuda:N", for a setting on a machine with `num_gpus` GPUs.

    "auto:N" selects GPU N modulo the number of GPUs, so that several workers share the GPUs. Without a GPU, "auto" and
    "auto:N" select the CPU. "cuda:N" requires GPU N. The default of N is 0, and `local_rank` is added to N.

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
    """Return the device's name for operators, for example "cpu", "cuda:0 NVIDIA H100" or "2 ranks, cpu"."""
    ranks = f"{num_ranks} ranks, " if num_ranks > 1 else ""
    return ranks + ("cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}")


def set_threads(num_threads: int, num_processes: int = 1) -> None:
    """Set the number of threads for torch and for the native CPU kernels.

    With 0, `num_processes` processes of this kind share the available cores equally.
    """
    count = num_threads or max(1, len(os.sched_getaffinity(0)) // num_processes)
    torch.set_num_threads(count)
    native_threads(count)
