"""KV blocks: how many fit into memory, and their tensors.

One block holds `block_size` tokens of one row in every layer:

    bytes of a block = sum over layers of 2 (key and value) x KV heads x head_dim x block_size x bytes per element

With grouped-query attention a model has fewer KV heads than query heads.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.linear import advise_huge_pages
from shared.config import ConfigError
from worker_svc.model.base import KVCache, KVShape


def block_bytes(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one block over all layers."""
    per_token = sum(2 * shape.num_kv_heads * shape.head_dim for shape in shapes)
    return per_token * block_size * dtype.itemsize


def count_blocks(memory: int, bytes_per_block: int, most_usable: int, setting: str) -> int:
    """Return the number of blocks to allocate: as many as fit into `memory` bytes, at most `most_usable`.

    Raises:
        ConfigError: no block fits; the message names `setting`.
    """
    fitting = memory // bytes_per_block
    if fitting < 1:
        raise ConfigError(
            f"{setting}: {max(memory, 0):,} bytes remain for the KV cache, but one block needs {bytes_per_block:,};"
            " raise it"
        )
    return min(fitting, most_usable)


def allocate(
    shapes: Sequence[KVShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    setting: str,
) -> tuple[KVCache, ...]:
    """Allocate the keys and values of each layer, each `[num_blocks, num_kv_heads, block_size, head_dim]`.

    The tensors are filled with zeros, so that the memory is committed now.

    Raises:
        ConfigError: there is not enough memory; the message names `setting`.
    """
    try:
        with torch.inference_mode():
            return tuple(
                (
                    _zeros(size, dtype, device),
                    _zeros(size, dtype, device),
                )
                for size in ((num_blocks, shape.num_kv_heads, block_size, shape.head_dim) for shape in shapes)
            )
    except (RuntimeError, MemoryError):
        size = num_blocks * block_bytes(shapes, block_size, dtype)
        raise ConfigError(f"{setting}: cannot allocate {size:,} bytes of KV cache; lower it") from None


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeros; on a CPU in huge pages if possible, because attention reads blocks in random order."""
    tensor = torch.empty(size, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(tensor)
    return tensor.zero_()


def cuda_memory_left(device: torch.device, utilization: float, profile: Callable[[], int], later: int) -> int:
    """Return the bytes of a GPU that remain for KV if the worker uses the share `utilization` of its memory.

    Args:
        device: the GPU.
        utilization: share of the GPU's memory for the whole worker, from 0 to 1.
        profile: runs the largest possible step; returns the bytes of KV that it allocated for the run. They are
            subtracted from the measured peak.
        later: bytes that the worker allocates after the KV cache.
    """
    torch.cuda.reset_peak_memory_stats(device)
    profiled_kv = profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - profiled_kv
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)  # other processes and the CUDA context
    return int(total * utilization) - elsewhere - peak - later
