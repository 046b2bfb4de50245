"""Rotary tables for the Llama family: each position's cosines and sines.

Supports the types of scaling that depend only on the configuration, with the same values as `transformers`:

* `linear`: all frequencies are divided by `factor`.
* `dynamic`: like `default`, because it differs only beyond the model's positions, which are not served.
* `yarn` (Peng et al., 2023, https://arxiv.org/abs/2309.00071): slow frequencies are divided by `factor`, fast ones are
  not, and those between `beta_fast` and `beta_slow` rotations within the original length are mixed. Queries and keys
  are also scaled, for a lower temperature of the attention.
* `llama3`: frequencies with a wavelength above the original length / `low_freq_factor` are divided by `factor`. Those
  with a wavelength below the original length / `high_freq_factor` are unchanged. Those in between are interpolated.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from worker_svc.model.decoder_config import DecoderConfig

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Supported types."""


def can_tabulate(config: DecoderConfig, head_dim: int) -> bool:
    """Return whether `rope_tables` supports the rotation of the model's class."""
    parameters = config.rope_parameters or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES or head_dim % 2 != 0:
        return False
    # The `transformers` classes rotate whole heads. They ignore a partial factor if there is no scaling, and fail
    # otherwise.
    share = parameters.get("partial_rotary_factor", 1.0)
    return rope_type == "default" or (isinstance(share, int | float) and int(head_dim * share) == head_dim)


def rope_tables(
    config: DecoderConfig, head_dim: int, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each `[num_positions, head_dim / 2] float32` on `device`."""
    frequencies, scaling = _frequencies(config, head_dim)
    angles = torch.outer(torch.arange(num_positions).float(), frequencies)
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)


def _frequencies(config: DecoderConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return each element pair's angle per position, `[head_dim / 2] float32`, and the scaling of both."""
    parameters = config.rope_parameters
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods = parameters["rope_theta"] ** exponents
    frequencies = 1.0 / periods
    match parameters["rope_type"]:
        case "linear":
            return frequencies / parameters["factor"], 1.0
        case "yarn":
            return _yarn(periods, head_dim, config)
        case "llama3":
            return _llama3(frequencies, parameters), 1.0
    return frequencies, 1.0


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    slow, fast = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original_length, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    wavelengths = 2 * math.pi / frequencies
    share = (original_length / wavelengths - slow) / (fast - slow)
    mixed = (1 - share) * frequencies / factor + share * frequencies
    scaled = torch.where(wavelengths > original_length / slow, frequencies / factor, mixed)
    return torch.where(wavelengths < original_length / fast, frequencies, scaled)


def _yarn(periods: torch.Tensor, head_dim: int, config: DecoderConfig) -> tuple[torch.Tensor, float]:
    parameters = config.rope_parameters
    original_length = parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    if factor is None:
        factor = config.max_position_embeddings / original_length

    def place(rotations: float) -> float:
        """Return the pair of elements, as a fraction, that rotates so often within the original length."""
        theta = math.log(parameters["rope_theta"])
        return head_dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * theta)

    first, last = place(parameters.get("beta_fast") or 32), place(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # Add a small step to avoid a division by zero.
    # Follow the operation order of `transformers`, because models are trained with its rounding.
    kept = 1 - ((torch.arange(head_dim // 2).float() - first) / (last - first)).clamp(0, 1)
    return 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept, _yarn_scaling(factor, parameters)


def _yarn_scaling(factor: float, parameters: Mapping[str, Any]) -> float:
    given: float | None = parameters.get("attention_factor")
    if given is not None:
        return given
    numerator, denominator = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (numerator and denominator):
        numerator, denominator = 1.0, 0.0
    growth = 0.1 * math.log(factor) if factor > 1 else 0.0
    return (growth * numerator + 1.0) / (growth * denominator + 1.0)
