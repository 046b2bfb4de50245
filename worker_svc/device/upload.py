"""Copies of host arrays to the device without waiting for the steps in flight."""

import numpy as np
import numpy.typing as npt
import torch


def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting for the copy.

    On a CPU the tensor shares the array's memory, so the caller must not change the array afterwards. On CUDA the copy
    uses pinned memory, which torch retains until the copy is complete. Every copy within a step uses this function,
    because a copy from pageable memory would wait for all steps in flight.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if not array.size:
        return torch.empty_like(tensor, device=device)
    return tensor.pin_memory().to(device, non_blocking=True)
