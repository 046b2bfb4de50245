"""Weights of one decoder layer of the Llama family, as matrices, before `llama_packed` may pack them."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer `x @ weight.T + bias`, with weight `[out, in]` and bias `[out]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `x` `[..., in]`."""
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer."""

    input_norm: torch.Tensor
    qkv: Linear
    """Rows: all query heads, then all key heads, then all value heads."""
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    """Rows: gate, then up."""
    down: Linear
    sliding_window: int | None
    """Number of tokens that the layer attends over; None: all."""
