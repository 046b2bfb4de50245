"""The KV blocks: how many fit, and the tensors themselves.

One block holds `block_size` tokens of one row in every layer:

    bytes of a block = sum over layers of 2 (key and value) x KV heads x head_dim x block_size x bytes per element

KV heads, not query heads: under grouped-query attention the latter would be up to eight times too many.
"""

from collections.abc import Callable, Sequence

import torch

from kernels.linear import advise_huge_pages
from shared.config import ConfigError
from worker_svc.model.base import KVCache, KVShape


def block_bytes(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(2 * shape.num_kv_heads * shape.head_dim for shape in shapes)
    return per_token * block_size * dtype.itemsize


def count_blocks(memory: int, bytes_per_block: int, most_usable: int, setting: str) -> int:
    """How many blocks to allocate: what fits into `memory` bytes, but no more than all rows together can use.

    Raises:
        ConfigError: not one fits; it names `setting`.
    """
    fitting = memory // bytes_per_block
    if fitting < 1:
        raise ConfigError(
            f"{setting}: {max(memory, 0):,} bytes are left for KV, but one block needs {bytes_per_block:,}"
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
    """Keys and values of each layer, `[num_blocks, num_kv_heads, block_size, head_dim]`, touched so that the memory is
    really there.

    Raises:
        ConfigError: the memory is not there; it names `setting`.
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
        raise ConfigError(f"{setting}: there is no memory for {size:,} bytes of KV; give it less") from None


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Touched memory; on a CPU in huge pages where the system has them, since attention jumps from block to block."""
    tensor = torch.empty(size, dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(tensor)
    return tensor.zero_()


def cuda_memory_left(device: torch.device, utilization: float, profile: Callable[[], int], later: int) -> int:
    """Bytes of a GPU left for KV when the worker as a whole uses the share `utilization` of it.

    Args:
        device: the GPU.
        utilization: share of its memory.
        profile: runs the largest possible step; returns the bytes of KV that it used, which do not count.
        later: bytes that will be taken besides, after KV.
    """
    torch.cuda.reset_peak_memory_stats(device)
    profiled_kv = profile()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - profiled_kv
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)  # other processes, and what CUDA itself takes
    return int(total * utilization) - elsewhere - peak - later
