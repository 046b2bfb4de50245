"""The device: which one, how data gets there, how many threads a CPU may use."""

import os

import numpy as np
import numpy.typing as npt
import torch

from shared.config import ConfigError


def choose_device(wanted: str) -> torch.device:
    """The device that the setting names; "auto" is CUDA if there is one, else the CPU. A GPU is made the current one.

    Raises:
        ConfigError: there is no such device.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"device: {wanted!r} is none; choose auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: there is no {wanted} here; choose auto or cpu")
    chosen = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(chosen)
    return chosen


def describe_device(device: torch.device) -> str:
    """What the operator reads, "cpu" or "cuda:0 NVIDIA H100"."""
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def set_threads(num_threads: int) -> None:
    """Gives torch `num_threads` CPU threads; 0: all cores that this process may run on."""
    torch.set_num_threads(num_threads or len(os.sched_getaffinity(0)))


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array on the device, without waiting for it.

    On a CPU the tensor *is* the array, so the caller gives it away. On CUDA it travels through pinned memory that
    torch keeps until the copy is done.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
