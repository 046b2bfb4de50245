"""Rotary tables of the hand-written models: cosines and sines of every position, for each scaling that
`transformers` computes from the configuration alone."""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""`dynamic` differs from `default` only beyond the positions the model allows, where nothing is served."""


def rope_tables(
    config: PretrainedConfig, head_dim: int, num_positions: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each `[num_positions, rotary_dim / 2] float32` on `device`."""
    parameters = config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        inverse_frequencies, scaling = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    else:
        inverse_frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    angles = torch.outer(torch.arange(num_positions).float(), inverse_frequencies.float())
    return (angles.cos() * scaling).to(device), (angles.sin() * scaling).to(device)
