"""Step sizes for a device and a model: default limits of rows and tokens, and the largest step to capture.

All functions are pure. Their speed estimates may be wrong by a factor of two.
"""

from dataclasses import dataclass

import torch

_ROWS = {"cpu": 64, "cuda": 256}
"""Default limit of running requests by device type; lower on a GPU with little memory."""
_TOKENS = {"cpu": 512, "cuda": 2048}
"""Smallest default limit of tokens per step by device type.

Matrix products with this many tokens reach full speed. The scheduler plans shorter steps if decode rows would wait too
long (`scheduler_svc/core/workers/chunks.py`).
"""
_MOST_TOKENS = 8192
"""Largest default limit of tokens per step on a GPU."""
_MEMORY_PER_TOKEN = 8 << 20
"""Bytes of GPU memory per token of the limit. A token's activations take about a hundredth of this."""
_MEMORY_PER_ROW = 64 << 20
"""Bytes of GPU memory per running request of the limit."""
_LONGEST_STEP_S = 0.5
"""Maximum estimated time of a step's matrix products, s. Decode rows wait for this time."""
_CLOCK_HZ = 1.6e9
"""Approximate clock of a GPU under load."""
_EFFICIENCY = 0.6
"""Fraction of peak performance reached by whole steps; measured on an H100 with 2,048 and 8,192 tokens."""
_FLOP_PER_CLOCK = ((120, 1024), (100, 8192), (90, 4096), (86, 1024), (80, 2048))
"""Lowest compute capability, and floating-point operations of 16-bit products per multiprocessor and clock."""
_OLDER_FLOP_PER_CLOCK = 1024
"""The same for all lower compute capabilities."""
_LAUNCHES_S = 0.45e-3
"""Time to launch one layer's kernels one by one; 0.35 to 0.55 ms on an H100's host."""
_LEAST_CAPTURED, _MOST_CAPTURED = 256, 2048
"""Bounds of the largest captured step in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Properties of a GPU."""

    total_memory: int
    """Bytes."""
    multiprocessors: int
    capability: int
    """Compute capability, 90 for 9.0."""

    @property
    def flop_per_s(self) -> float:
        """Estimated operations per second for a step's matrix products."""
        known = (flop for least, flop in _FLOP_PER_CLOCK if self.capability >= least)
        return _EFFICIENCY * self.multiprocessors * _CLOCK_HZ * next(known, _OLDER_FLOP_PER_CLOCK)


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the properties of `device`; None for a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return Gpu(
        total_memory=found.total_memory,
        multiprocessors=found.multi_processor_count,
        capability=10 * found.major + found.minor,
    )


def default_rows(gpu: Gpu | None) -> int:
    """Return the default limit of running requests; None on a CPU."""
    if gpu is None:
        return _ROWS["cpu"]
    return min(_ROWS["cuda"], max(_ROWS["cpu"], _power_of_2(gpu.total_memory / _MEMORY_PER_ROW)))


def default_tokens(gpu: Gpu | None, num_weights: int, max_rows: int) -> int:
    """Return the default token limit per step; at least half of it is available for prefill.

    Args:
        gpu: the GPU; None for a CPU.
        num_weights: a rank's weights in the matrix products of a token, without the head; 0 for unknown.
        max_rows: the limit of running requests.
    """
    if gpu is None:
        return max(_TOKENS["cpu"], 2 * max_rows)
    in_time = _LONGEST_STEP_S * gpu.flop_per_s / (2 * num_weights) if num_weights else _TOKENS["cuda"]
    fitting = _power_of_2(min(in_time, gpu.total_memory / _MEMORY_PER_TOKEN))
    return max(min(_MOST_TOKENS, max(_TOKENS["cuda"], fitting)), 2 * max_rows)


def largest_captured(gpu: Gpu | None, num_weights: int, num_layers: int) -> int:
    """Return the number of tokens up to which a step with chunks or drafts is captured as a graph.

    For a larger step, the host can launch the kernels faster than the device computes them. A graph would then save no
    time but would add padding.

    Args:
        gpu: the GPU; None for a stand-in on a CPU.
        num_weights: as in `default_tokens`.
        num_layers: number of layers.
    """
    break_even = _LEAST_CAPTURED
    if gpu is not None and num_weights:
        break_even = int(_LAUNCHES_S * num_layers * gpu.flop_per_s / (2 * num_weights))
    return -(-max(_LEAST_CAPTURED, min(break_even, _MOST_CAPTURED)) // 64) * 64


def _power_of_2(most: float) -> int:
    """Return the largest power of two up to `most`, at least 1."""
    return 1 << max(int(most).bit_length() - 1, 0)
