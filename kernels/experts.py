"""Mixture of experts (Shazeer et al., 2017): each token is computed by the experts that a router chooses.

    x           [T, hidden]
    logits      [T, num_experts], from the router; any dtype
    gate_up     [num_experts, 2 · intermediate, hidden]: for each expert the gate, then up
    down        [num_experts, hidden, intermediate]
    result      [T, hidden]: the sum over a token's ``top_k`` experts e of  p_e · down_e(silu(gate_e(x)) · up_e(x))

``p`` is the softmax of the logits. The experts with the largest p are chosen. With ``renormalise``, their p values are
divided by their sum.

The T · top_k (token, expert) *pairs* are sorted by expert, which makes each expert's rows adjacent. One kernel launch
then computes the products for all experts (a *grouped* product). The first grouped product reads one row per token; the
second writes one row per pair. The number of rows per expert stays on the device: the grid is large enough for every
distribution, and programs without rows return at once. The shapes therefore do not depend on the routing, and a step
can be captured in a CUDA graph. No token is dropped.

A pair's result does not depend on the other rows. A token's sum adds its experts in the order of their p. On a CPU the
worker calls `kernels.decoder` instead; this module's CPU path is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernels._dispatch import next_power_of_2, runs_on_triton
from kernels.activation import silu_mul


@dataclass(frozen=True, slots=True)
class Pairs:
    """The (token, expert) pairs, sorted by expert."""

    order: torch.Tensor
    """``[T * top_k] int64``: for each pair, token · top_k + the rank of the expert among the token's choices."""
    starts: torch.Tensor
    """``[num_experts + 1] int64``: the pairs of expert e are ``starts[e] .. starts[e + 1]``."""
    top_k: int


def mix_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalise: bool,
) -> torch.Tensor:
    """Compute the mixture of experts for every token (shapes and rules: see the module)."""
    if not runs_on_triton(x):
        return mix_experts_reference(x, logits, gate_up, down, top_k=top_k, renormalise=renormalise)
    weights, experts = route(logits, top_k, renormalise)
    pairs = sort_pairs(experts, gate_up.shape[0])
    inner = silu_mul(_grouped_product(x, gate_up, pairs, None))
    outputs = _grouped_product(inner, down, pairs, weights)
    return outputs.view(x.shape[0], top_k, -1).sum(1)


def mix_experts_reference(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    top_k: int,
    renormalise: bool,
) -> torch.Tensor:
    """Plain torch form of `mix_experts`, expert by expert, which is also the CPU path."""
    weights, experts = route(logits, top_k, renormalise)
    out = torch.zeros_like(x)
    for number in range(gate_up.shape[0]):
        tokens, choices = (experts == number).nonzero(as_tuple=True)
        gate, up = linear(x[tokens], gate_up[number]).chunk(2, dim=-1)
        found = linear(torch.nn.functional.silu(gate) * up, down[number])
        out.index_add_(0, tokens, (found * weights[tokens, choices, None]).to(x.dtype))
    return out


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the indices of each token's experts, each ``[T, top_k]``, the largest weight first.

    The weights are float32, or float64 for float64 logits.
    """
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, experts = probabilities.topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts


def sort_pairs(experts: torch.Tensor, num_experts: int) -> Pairs:
    """Sort the (token, expert) pairs given by ``experts`` ``[T, top_k]`` by expert, on the device."""
    found, order = experts.flatten().sort(stable=True)
    starts = torch.searchsorted(found, torch.arange(num_experts + 1, device=experts.device))
    return Pairs(order, starts, experts.shape[1])


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, pairs: Pairs, factors: torch.Tensor | None) -> torch.Tensor:
    """Multiply each expert's rows by the expert's matrix in ``weight`` ``[num_experts, outputs, inputs]``.

    Without ``factors``, ``x`` has a row per token, and the result has a row per pair in sorted order. With ``factors``
    ``[T, top_k]``, ``x`` has a row per pair in sorted order, and row token · top_k + choice of the result is multiplied
    by the pair's factor.
    """
    num_experts, outputs, inputs = weight.shape
    num_pairs = pairs.order.shape[0]
    out = torch.empty(num_pairs, outputs, dtype=x.dtype, device=x.device)
    tall = _tile_rows(num_pairs, num_experts)
    wide, deep = (64, 32) if x.dtype == torch.float32 else (128, 64)
    # Each expert with rows has at most one partial tile.
    num_tiles = num_pairs // tall + min(num_experts, num_pairs)
    from kernels.gpu.experts import grouped_product_kernel

    grouped_product_kernel[(num_tiles, -(-outputs // wide))](
        x,
        weight,
        factors,
        pairs.order,
        pairs.starts,
        out,
        x.stride(0),
        num_experts,
        outputs,
        inputs,
        TOP_K=pairs.top_k,
        EXPERTS=next_power_of_2(num_experts),
        SCATTERS=factors is not None,
        TALL=tall,
        WIDE=wide,
        DEEP=deep,
        num_warps=8 if tall > 32 else 4,
    )
    return out


def _tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the number of rows per tile, which is large if experts have many rows under even routing.

    There are only two sizes, so that a worker's first steps compile both.
    """
    return 128 if num_pairs > 32 * num_experts else 16
