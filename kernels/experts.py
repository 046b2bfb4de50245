"""Mixture of experts (Shazeer et al., 2017): each token is computed by the experts that a router chooses.

    x           [T, hidden]
    logits      [T, num_experts], from the router; any dtype
    gate_up     [num_experts, 2 · intermediate, hidden]: for each expert the gate, then up
    down        [num_experts, hidden, intermediate]
    result      [T, hidden]: the sum over a token's ``top_k`` experts e of  p_e · down_e(silu(gate_e(x)) · up_e(x))

The matrices may be quantised: `kernels.weight_only` (16-bit activations) or `kernels.fp8_linear` (activations in e4m3).
Experts may have biases and a clamped activation (gpt-oss, `kernels.activation.ClampedSwiglu`).

``p`` is the softmax of the logits. The experts with the largest p are chosen. With ``renormalise``, their p values are
divided by their sum.

One kernel chooses the experts of all tokens. A second one sorts the T · top_k (token, expert) *pairs* by expert, which
makes each expert's rows adjacent. One kernel launch then computes the products for all experts (a *grouped* product).
The first grouped product reads one row per token; the second writes one row per pair. The number of rows per expert
stays on the device: the grid is large enough for every distribution, and programs without rows return at once. The
shapes therefore do not depend on the routing, and a step can be captured in a CUDA graph. No token is dropped.

With few pairs, the inputs of a product are divided among several programs, and another kernel adds the parts. The
number of parts depends on the sizes of the weights and on whether there are at most 32 pairs, so a pair's result does
not depend on the other rows within either range. A token's sum adds its experts in the order of their p. On a CPU the
worker calls `kernels.decoder` instead; this module's CPU path is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from kernels import weight_only
from kernels._dispatch import architecture, next_power_of_2, runs_on_triton
from kernels.activation import ClampedSwiglu, gated, gated_reference
from kernels.fp8_linear import DEEP, Fp8Weight, fp8_linear_reference, quantise_rows, tile_outputs
from kernels.weight_only import WeightOnly, add_splits, kernel_options, num_splits, weight_only_linear_reference

ExpertWeights = torch.Tensor | WeightOnly | Fp8Weight
"""Matrices of one layer of all experts: ``[num_experts, outputs, inputs]``, perhaps quantised."""
_FEW_PAIRS = 32
"""Up to this number of pairs, the inputs of a product may be divided among programs."""
_SORTED_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True)
class Pairs:
    """The (token, expert) pairs, sorted by expert."""

    order: torch.Tensor
    """``[T * top_k] int32``: for each pair, token · top_k + the rank of the expert among the token's choices."""
    starts: torch.Tensor
    """``[num_experts + 1] int32``: the pairs of expert e are ``starts[e] .. starts[e + 1]``."""
    top_k: int


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """Weights and activation of all experts."""

    gate_up: ExpertWeights
    down: ExpertWeights
    gate_up_bias: torch.Tensor | None = None
    """``[num_experts, 2 * intermediate]``."""
    down_bias: torch.Tensor | None = None
    """``[num_experts, hidden]``."""
    clamped: ClampedSwiglu | None = None
    """Activation; None: ``silu(gate) * up``."""


def mix_experts(
    x: torch.Tensor, logits: torch.Tensor, layers: ExpertLayers, *, top_k: int, renormalise: bool
) -> torch.Tensor:
    """Compute the mixture of experts for every token (shapes and rules: see the module)."""
    if not runs_on_triton(x):
        return mix_experts_reference(x, logits, layers, top_k=top_k, renormalise=renormalise)
    if not len(x):
        return torch.empty_like(x)
    weights, experts = route(logits, top_k, renormalise)
    pairs = sort_pairs(experts, logits.shape[1])
    inner = gated(_grouped_product(x, layers.gate_up, layers.gate_up_bias, pairs, None), layers.clamped)
    return _grouped_product(inner, layers.down, layers.down_bias, pairs, weights)


def mix_experts_reference(
    x: torch.Tensor, logits: torch.Tensor, layers: ExpertLayers, *, top_k: int, renormalise: bool
) -> torch.Tensor:
    """Plain torch form of `mix_experts`, expert by expert, which is also the CPU path."""
    weights, experts = route_reference(logits, top_k, renormalise)
    out = torch.zeros_like(x)
    for number in range(logits.shape[1]):
        tokens, choices = (experts == number).nonzero(as_tuple=True)
        gate_up = _product_reference(x[tokens], layers.gate_up, layers.gate_up_bias, number)
        found = _product_reference(gated_reference(gate_up, layers.clamped), layers.down, layers.down_bias, number)
        out.index_add_(0, tokens, (found * weights[tokens, choices, None]).to(x.dtype))
    return out


def _product_reference(
    x: torch.Tensor, weight: ExpertWeights, biases: torch.Tensor | None, number: int
) -> torch.Tensor:
    """Multiply the rows of one expert."""
    bias = None if biases is None else biases[number].to(x.dtype)
    if isinstance(weight, WeightOnly):
        return weight_only_linear_reference(x, weight.expert(number), bias)
    if isinstance(weight, Fp8Weight):
        return fp8_linear_reference(x, weight.expert(number), bias)
    return linear(x, weight[number], bias)


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the indices of each token's experts, each ``[T, top_k]``, the largest weight first.

    The weights are float32, or float64 for float64 logits. The indices are int32.
    """
    if not runs_on_triton(logits):
        return route_reference(logits, top_k, renormalise)
    from kernels.gpu.experts import route_kernel

    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    tile = next_power_of_2(num_experts)
    tall = max(1, min(16, 512 // tile))
    route_kernel[(-(-num_tokens // tall),)](
        logits.contiguous(),
        weights,
        chosen,
        num_tokens,
        num_experts,
        TOP_K=top_k,
        CHOICES=next_power_of_2(top_k),
        EXPERTS=tile,
        RENORMALISE=renormalise,
        TALL=tall,
        num_warps=4,
    )
    return weights, chosen


def route_reference(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch form of `route`, which is also the CPU path."""
    probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    weights, experts = probabilities.topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if renormalise else weights), experts.int()


def sort_pairs(experts: torch.Tensor, num_experts: int) -> Pairs:
    """Sort the (token, expert) pairs given by ``experts`` ``[T, top_k]`` int32 by expert, on a GPU."""
    from kernels.gpu.experts import sort_pairs_kernel

    num_pairs = experts.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    sort_pairs_kernel[(num_experts + 1,)](
        experts, order, starts, num_pairs, num_experts, SIZE=_SORTED_AT_A_TIME, num_warps=4
    )
    return Pairs(order, starts, experts.shape[1])


def _grouped_product(
    x: torch.Tensor,
    weight: ExpertWeights,
    bias: torch.Tensor | None,
    pairs: Pairs,
    factors: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply each expert's rows by the expert's matrix, and add the expert's bias.

    Without ``factors``, ``x`` has a row per token, and the result has a row per pair in sorted order. With ``factors``
    ``[T, top_k]``, ``x`` has a row per pair in sorted order, and the result has a row per token: the sum of the
    token's pairs, each multiplied by its factor.
    """
    from kernels.gpu.experts import fp8_experts_kernel, grouped_product_kernel, weight_only_experts_kernel

    num_experts, num_pairs = len(pairs.starts) - 1, pairs.order.shape[0]
    outputs = weight.shape[1] if isinstance(weight, torch.Tensor) else weight.outputs
    inputs = x.shape[1]
    tall = _tile_rows(num_pairs, num_experts)
    if isinstance(weight, Fp8Weight):
        tall = min(tall, 64)
        wide, step, num_warps = tile_outputs(weight, tall), DEEP, 4
    elif isinstance(weight, WeightOnly):
        wide = 64 if tall == 16 or x.dtype == torch.float32 else weight_only.tile_outputs(x)
        step, num_warps = weight_only.CHUNK, 8 if tall > 16 else 4
    else:
        wide, step = (64, 32) if x.dtype == torch.float32 else (128, 64)
        num_warps = 8 if tall > 32 else 4
    # Each expert with rows has at most one partial tile.
    num_tiles, across = num_pairs // tall + min(num_experts, num_pairs), -(-outputs // wide)
    steps = -(-inputs // step)
    per_split = steps
    if num_pairs <= _FEW_PAIRS:
        per_split = -(-steps // num_splits(x, pairs.top_k * across, steps))
    splits = -(-steps // per_split)
    out = torch.empty(splits, num_pairs, outputs, dtype=x.dtype if splits == 1 else torch.float32, device=x.device)
    grid = (num_tiles, across, splits)
    rows = (bias, factors, pairs.order, pairs.starts, out, num_pairs, num_experts, outputs, inputs)
    options = {
        "TOP_K": pairs.top_k,
        "EXPERTS": next_power_of_2(num_experts),
        "SCATTERS": factors is not None,
        "TALL": tall,
        "WIDE": wide,
        "num_warps": num_warps,
    }
    if isinstance(weight, Fp8Weight):
        high, block = weight.block
        group = min(block, inputs)
        codes, scales = quantise_rows(x.contiguous(), group)
        fp8_experts_kernel[grid](
            codes,
            scales,
            weight.codes,
            weight.scales,
            *rows,
            per_split * DEEP,
            inputs // group,
            weight.scales.shape[1],
            **options,
            GROUP=0 if group == inputs else group,
            HIGH=high,
            NATIVE=architecture(x) >= 89,
            DEEP=DEEP,
            num_stages=4 if tall == 16 else 3,
        )
    elif isinstance(weight, WeightOnly):
        weight_only_experts_kernel[grid](
            x,
            weight.codes,
            weight.scales,
            weight.zeros,
            weight.factors,
            *rows,
            per_split,
            x.stride(0),
            weight.codes.stride(1),
            weight.scales.shape[1],
            **options,
            **kernel_options(weight, x),
            num_stages=3 if tall > 16 else 4,
        )
    else:
        grouped_product_kernel[grid](x, weight, *rows, per_split * step, x.stride(0), **options, DEEP=step)
    if factors is None and splits == 1:
        return out[0]
    if splits == 1:
        return out.view(-1, pairs.top_k, outputs).sum(1)
    choices = 1 if factors is None else pairs.top_k
    added = torch.empty(num_pairs // choices, outputs, dtype=x.dtype, device=x.device)
    add_splits(out, None, added, choices)
    return added


def _tile_rows(num_pairs: int, num_experts: int) -> int:
    """Return the number of rows per tile, which is large if experts have many rows under even routing.

    There are only two sizes, so that a worker's first steps compile both.
    """
    return 128 if num_pairs > 32 * num_experts else 16
