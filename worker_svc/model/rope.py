"""Rotary tables of the Llama family: cosines and sines of every position.

Supports the types of scaling that `transformers` computes from the configuration alone.
"""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Supported types. `dynamic` differs from `default` only beyond the model's positions, which are not served."""


def can_tabulate(config: PretrainedConfig, head_dim: int) -> bool:
    """Return whether `rope_tables` supports the rotation of the model's class."""
    parameters = getattr(config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in ROPE_TYPES or head_dim % 2 != 0:
        return False
    # The classes rotate whole heads. They ignore a partial factor without scaling, and fail with it otherwise.
    share = parameters.get("partial_rotary_factor", 1.0)
    return rope_type == "default" or (isinstance(share, int | float) and int(head_dim * share) == head_dim)


def rope_tables(
    config: PretrainedConfig, head_dim: int, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each `[num_positions, head_dim / 2] float32` on `device`."""
    parameters = config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        inverse_frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies.float())
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)
