"""KV blocks: the number that fits into memory, and their tensors.

One block holds `block_size` tokens of one row in every layer. `shared.kv_sizes` contains the size formula. A quantised
cache also has scales (`kernels.kv_quantised`).
"""

from collections.abc import Callable, Sequence

import torch

from kernels.kv_quantised import DTYPES, cached_size
from kernels.linear import advise_huge_pages
from shared.config import ConfigError
from shared.kv_sizes import kv_bytes_of_layer
from worker_svc.model.base import KVCache, KVShape

_GRAPH_BYTES = 2 << 20
"""Upper bound on the memory of a graph without its tensors, for kernel launches and their arguments, bytes."""


def block_bytes(shapes: Sequence[KVShape], block_size: int, dtype: torch.dtype) -> int:
    """Return one block's bytes over all layers; `dtype` as in `kernels.kv_quantised`."""
    return block_size * sum(map(sum, layer_bytes(shapes, dtype)))


def layer_bytes(shapes: Sequence[KVShape], dtype: torch.dtype) -> list[tuple[int, int]]:
    """Return the bytes of a token's keys and of its values in each layer; `dtype` as in `kernels.kv_quantised`."""
    quantised = {chosen: name for name, chosen in DTYPES.items()}
    kv_type = quantised.get(dtype) or str(dtype).removeprefix("torch.")
    return [kv_bytes_of_layer(shape.num_kv_heads, shape.widths, kv_type) for shape in shapes]


def allocate(
    shapes: Sequence[KVShape],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    setting: str,
) -> tuple[KVCache, ...]:
    """Allocate the keys and values of each layer, each `[num_blocks, num_kv_heads, block_size, width]`.

    The widths are those of a shape, or of `kernels.kv_quantised.cached_size` for a quantised cache. The tensors are
    filled with zeros, so that the memory is committed now.

    Raises:
        ConfigError: there is not enough memory; the message names `setting`.
    """
    try:
        with torch.inference_mode():
            return tuple(
                (_zeros((*places, keys), dtype, device), _zeros((*places, values), dtype, device))
                for places, (keys, values) in (
                    (
                        (num_blocks, shape.num_kv_heads, block_size),
                        (cached_size(width, dtype) for width in shape.widths),
                    )
                    for shape in shapes
                )
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


def share_for_kv(
    *, total: int, utilization: float, available: int, available_after: int, peak: int, graphs: int, device: str
) -> int:
    """Return the GPU bytes that remain for KV if a worker uses the fraction `utilization` of the memory.

    The share is for one worker. Other processes do not reduce the share, but must leave this memory free.

    Args:
        total: bytes of the GPU.
        utilization: share of the GPU's memory for the whole worker, from 0 to 1.
        available: bytes that are free or that torch holds in this process, before the largest step is computed.
        available_after: the same afterwards; libraries have loaded their kernels meanwhile.
        peak: most bytes of tensors in this process, weights included, besides KV.
        graphs: bytes that graphs take after the KV cache is allocated.
        device: name of the GPU in messages.

    Raises:
        ConfigError: less is available than the share.
    """
    share = int(total * utilization)
    if available < share:
        fitting = int(95 * available / total) / 100
        raise ConfigError(
            f"gpu_memory_utilization: {utilization:g} of {device} are {share:,} bytes, but other processes leave"
            f" {available:,}; lower it, for example to {fitting:.2f}, or stop them (workers that share a GPU need"
            " shares that add up to less than 1)"
        )
    return share - peak - graphs - max(0, available - available_after)


def cuda_memory_for_kv(
    device: torch.device,
    utilization: float,
    largest_step: Callable[[], int],
    captured_step: Callable[[], int] | None,
    num_graphs: int,
) -> int:
    """Measure the memory for steps and graphs on a GPU, and return `share_for_kv`.

    Args:
        device: the GPU.
        utilization: see `share_for_kv`.
        largest_step: runs the largest possible step; returns the KV bytes allocated for the run.
        captured_step: the same for the largest step that is captured as a graph; None for no graphs.
        num_graphs: number of graphs.
    """
    available, total = _available(device), torch.cuda.mem_get_info(device)[1]
    weights = torch.cuda.memory_allocated(device)
    step = _peak(device, largest_step)
    # All graphs share one memory pool, which is as large as the largest graph.
    graphs = 0 if captured_step is None else _peak(device, captured_step) + num_graphs * _GRAPH_BYTES
    torch.cuda.empty_cache()
    return share_for_kv(
        total=total,
        utilization=utilization,
        available=available,
        available_after=_available(device),
        peak=weights + step,
        graphs=graphs,
        device=str(device),
    )


def _available(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def _peak(device: torch.device, run: Callable[[], int]) -> int:
    """Return the peak tensor bytes during `run`, without the KV bytes that it returns."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kv = run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - kv
