"""The weights of one decoder layer of the Llama family, as matrices; both ways to compute it start from them."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`, weight `[out, in]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer."""

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
