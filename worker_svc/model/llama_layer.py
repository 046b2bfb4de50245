"""Weights of one Llama-family decoder layer, as matrices, before `llama_packed` may pack them."""

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernels.activation import ClampedSwiglu, silu_mul
from kernels.experts import ExpertLayers, ExpertWeights, mix_experts
from kernels.fp8_linear import Fp8Weight, fp8_linear
from kernels.weight_only import WeightOnly, weight_only_linear

Codes = tuple[WeightOnly | Fp8Weight, ...]


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layer `x @ weight.T + bias`, with weight `[out, in]` and bias `[out]`."""

    weight: torch.Tensor
    """Empty if `codes` has the weights."""
    bias: torch.Tensor | None
    codes: Codes = ()
    """Quantised weights on a GPU, whose outputs are concatenated."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to `x` `[..., in]`."""
        if not self.codes:
            return linear(x, self.weight, self.bias)
        results, first = [], 0
        for part in self.codes:
            bias = None if self.bias is None else self.bias[first : first + part.outputs]
            if isinstance(part, Fp8Weight):
                results.append(fp8_linear(x, part, bias))
            else:
                results.append(weight_only_linear(x, part, bias))
            first += part.outputs
        return results[0] if len(results) == 1 else torch.cat(results, -1)


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated MLP."""

    gate_up: Linear
    """Rows: gate, then up."""
    down: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to `x` `[T, hidden]`."""
        return self.down(silu_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class Mixture:
    """Mixture of experts: the experts that the router chooses compute each token."""

    router: Linear
    gate_up: ExpertWeights
    """`[experts, 2 * intermediate, hidden]`; an expert's rows: gate, then up; with `clamped`, alternating."""
    down: ExpertWeights
    """`[experts, hidden, intermediate]`."""
    top_k: int
    """Experts of a token."""
    renormalise: bool
    """Whether the weights of a token's experts are divided by their sum."""
    shared: Mlp | None
    """Expert that computes all tokens; None if there is none."""
    shared_gate: Linear | None
    """Computes the logit of the shared expert's weight."""
    gate_up_bias: torch.Tensor | None = None
    """`[experts, 2 * intermediate]`."""
    down_bias: torch.Tensor | None = None
    """`[experts, hidden]`."""
    clamped: ClampedSwiglu | None = None
    """Activation of the experts; None: SiLU."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the mixture to `x` `[T, hidden]`."""
        layers = ExpertLayers(self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.clamped)
        mixed = mix_experts(x, self.router(x), layers, top_k=self.top_k, renormalise=self.renormalise)
        if self.shared is None or self.shared_gate is None:
            return mixed
        return mixed + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


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
    mlp: Mlp | Mixture
    sliding_window: int | None
    """Number of tokens that the layer attends over; None for all."""
    sinks: torch.Tensor | None = None
    """`[heads]` float32: logit of each head's attention sink."""
