"""The device: which one, how data gets there, how many threads a CPU may use."""

import os
import re

import numpy as np
import numpy.typing as npt
import torch

from kernels.native.library import set_num_threads as native_threads
from shared.config import ConfigError


def choose_device(wanted: str) -> torch.device:
    """The device that the setting names. A GPU is made the current one.

    Raises:
        ConfigError: there is no such device.
    """
    device = torch.device(name_device(wanted, torch.cuda.device_count() if torch.cuda.is_available() else 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def name_device(wanted: str, num_gpus: int) -> str:
    """What the setting means on a machine with so many GPUs: "cpu" or "cuda:N".

    "auto" and "auto:N" take GPU N counted round, so that N workers share what there is, and the CPU where there is no
    GPU; "cuda" and "cuda:N" insist on that GPU.

    Raises:
        ConfigError: no such form, or no such GPU.
    """
    match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d{1,4}))?", wanted)
    if match is None or wanted.startswith("cpu:"):
        raise ConfigError(f"device: {wanted!r} is none; choose auto, cpu, cuda or cuda:N")
    kind, index = match[1], int(match[2] or 0)
    if kind == "auto" and num_gpus:
        return f"cuda:{index % num_gpus}"
    if kind != "cuda":
        return "cpu"
    if index >= num_gpus:
        here = "no GPU" if not num_gpus else "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise ConfigError(f"device: there is no cuda:{index} here but {here}; choose another, auto or cpu")
    return f"cuda:{index}"


def describe_device(device: torch.device) -> str:
    """What the operator reads, "cpu" or "cuda:0 NVIDIA H100"."""
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def set_threads(num_threads: int) -> None:
    """Gives torch and the CPU kernels `num_threads` threads; 0: all cores that this process may run on."""
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    native_threads(count)


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for it.

    On a CPU the tensor *is* the array, so the caller gives it away. On CUDA it travels through pinned memory that
    torch keeps until the copy is done. Whatever goes to the device within a step comes this way: a copy from memory
    that is not pinned would wait for all steps in flight.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if not array.size:
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)
