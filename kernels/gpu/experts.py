"""Triton kernels of `kernels.experts`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel_with, tl
from kernels.gpu.fp8_linear import multiply_blocks
from kernels.gpu.weight_only import multiply_chunks


@kernel_with(varying=("num_tokens",))
def route_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    num_tokens: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TALL: tl.constexpr,
) -> None:
    """Choose the experts of some tokens per program. Of equal logits, the first one is chosen first.

    If a logit is not finite, the token's weights are NaN, and its experts are valid.
    """
    token, expert, choice = tl.program_id(0) * TALL + tl.arange(0, TALL), tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    is_token = (token < num_tokens)[:, None]
    is_expert = (expert < num_experts)[None, :]
    place = token.to(tl.int64)[:, None] * num_experts + expert[None, :]
    logits = tl.load(logits_ptr + place, mask=is_token & is_expert, other=0.0).to(tl.float32)
    logits = tl.where(is_expert, logits, -float("inf"))
    left = tl.exp(logits - tl.max(logits, 1)[:, None])
    total = tl.sum(left, 1)[:, None]
    weights = tl.zeros([TALL, CHOICES], dtype=tl.float32)
    experts = tl.zeros([TALL, CHOICES], dtype=tl.int32)
    for rank in range(TOP_K):
        best = tl.max(left, 1)[:, None]
        found = tl.min(tl.where(left == best, expert[None, :], num_experts - 1), 1)[:, None]
        weights = tl.where(choice[None, :] == rank, best, weights)
        experts = tl.where(choice[None, :] == rank, found, experts)
        left = tl.where(expert[None, :] == found, -1.0, left)
    weights /= total
    if RENORMALISE:
        weights /= tl.sum(weights, 1)[:, None]
    place = token.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    is_choice = is_token & (choice < TOP_K)[None, :]
    tl.store(weights_ptr + place, weights, mask=is_choice)
    tl.store(experts_ptr + place, experts, mask=is_choice)


@kernel_with(varying=("num_pairs",))
def sort_pairs_kernel(
    experts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Find the pairs of one expert per program, in order; one more program counts all pairs."""
    own, place = tl.program_id(0), tl.arange(0, SIZE)
    counts = tl.zeros([SIZE], dtype=tl.int32)
    for first in range(0, num_pairs, SIZE):
        found = tl.load(experts_ptr + first + place, mask=first + place < num_pairs, other=num_experts)
        counts += (found < own).to(tl.int32)
    begin = tl.sum(counts, 0)
    tl.store(starts_ptr + own, begin)
    for first in range(0, num_pairs, SIZE):
        inside = first + place < num_pairs
        found = tl.load(experts_ptr + first + place, mask=inside, other=num_experts)
        is_own = (found == own) & inside
        ranks = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order_ptr + begin + ranks - 1, first + place, mask=is_own)
        begin += tl.sum(is_own.to(tl.int32), 0)


@jit
def _rows_of_tile(
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    TALL: tl.constexpr,
) -> tl.tuple:
    """Return a tile's expert, and for each row: whether it exists, its pair, and its places in x and in the result.

    A program finds its expert by counting the experts whose tiles all come before it. Without rows, the expert is
    ``num_experts``.
    """
    tile = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    begins = tl.load(starts_ptr + number, mask=number < num_experts, other=0)
    ends = tl.load(starts_ptr + number + 1, mask=number < num_experts, other=0)
    tiles = (ends - begins + TALL - 1) // TALL
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(number < expert, tiles, 0), 0)
    begin = tl.sum(tl.where(number == expert, begins, 0), 0)
    end = tl.sum(tl.where(number == expert, ends, 0), 0)
    place = begin + (tile - before) * TALL + tl.arange(0, TALL)
    inside = place < end
    pair = tl.load(order_ptr + place, mask=inside, other=0)
    source = place if SCATTERS else pair // TOP_K
    target = pair if SCATTERS else place
    return expert.to(tl.int64), inside, pair, source.to(tl.int64), target.to(tl.int64)


@jit
def _store(
    total: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    out_ptr: tl.tensor,
    expert: tl.tensor,
    inside: tl.tensor,
    pair: tl.tensor,
    target: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    num_pairs: tl.tensor,
    SCATTERS: tl.constexpr,
) -> None:
    """Add the expert's bias to the first part, multiply with the factors of the pairs, and store the rows."""
    has_output, split = output < outputs, tl.program_id(2)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * outputs + output, mask=has_output, other=0.0).to(tl.float32)
        total += tl.where(split == 0, bias, 0.0)[None, :]
    if SCATTERS:
        total *= tl.load(factors_ptr + pair, mask=inside, other=0.0)[:, None]
    tl.store(
        out_ptr + (split.to(tl.int64) * num_pairs + target)[:, None] * outputs + output[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & has_output[None, :],
    )


@kernel_with(varying=("num_pairs",))
def grouped_product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    per_split: tl.tensor,
    x_stride: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
) -> None:
    """Compute one tile per program: some rows of one expert by some outputs, over one part of the inputs."""
    expert, inside, pair, source, target = _rows_of_tile(
        order_ptr, starts_ptr, num_experts, TOP_K, EXPERTS, SCATTERS, TALL
    )
    if expert >= num_experts:
        return
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    deep = tl.arange(0, DEEP)
    x_base = x_ptr + source[:, None] * x_stride
    weight_base = weight_ptr + (expert * outputs + output)[None, :] * inputs
    first = tl.program_id(2) * per_split
    end = tl.minimum(first + per_split, inputs)
    total = tl.zeros([TALL, WIDE], dtype=tl.float32)
    for start in range(first, end, DEEP):
        left = end - start
        x = tl.load(x_base + (start + deep)[None, :], mask=inside[:, None] & (deep < left)[None, :], other=0.0)
        weight = tl.load(
            weight_base + (start + deep)[:, None], mask=(output < outputs)[None, :] & (deep < left)[:, None], other=0.0
        )
        total = tl.dot(x, weight, total, input_precision="ieee")
    _store(total, bias_ptr, factors_ptr, out_ptr, expert, inside, pair, target, output, outputs, num_pairs, SCATTERS)


@kernel_with(varying=("num_pairs",))
def weight_only_experts_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    weight_factors_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    per_split: tl.tensor,
    x_stride: tl.tensor,
    codes_stride: tl.tensor,
    groups: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    OFFSETS: tl.constexpr,
    NATIVE: tl.constexpr,
    RAGGED: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """As `grouped_product_kernel`, over the codes of `kernels.weight_only`."""
    expert, inside, pair, source, target = _rows_of_tile(
        order_ptr, starts_ptr, num_experts, TOP_K, EXPERTS, SCATTERS, TALL
    )
    if expert >= num_experts:
        return
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    zeros, weight_factors = zeros_ptr, weight_factors_ptr
    if zeros_ptr is not None:
        zeros = zeros_ptr + expert * groups * outputs
    if weight_factors_ptr is not None:
        weight_factors = weight_factors_ptr + expert * outputs
    total = multiply_chunks(
        x_ptr + source * x_stride,
        inside,
        codes_ptr + expert * outputs * codes_stride,
        scales_ptr + expert * groups * outputs,
        zeros,
        weight_factors,
        codes_stride,
        output,
        outputs,
        inputs,
        tl.program_id(2),
        per_split,
        KIND,
        GROUP,
        SCALES,
        OFFSETS,
        NATIVE,
        RAGGED,
        TALL,
        WIDE,
    )
    _store(total, bias_ptr, factors_ptr, out_ptr, expert, inside, pair, target, output, outputs, num_pairs, SCATTERS)


@kernel_with(varying=("num_pairs",))
def fp8_experts_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    order_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    per_split: tl.tensor,
    groups: tl.tensor,
    output_blocks: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCATTERS: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
    NATIVE: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
    DEEP: tl.constexpr,
) -> None:
    """As `grouped_product_kernel`, over rows and weights in e4m3."""
    expert, inside, pair, source, target = _rows_of_tile(
        order_ptr, starts_ptr, num_experts, TOP_K, EXPERTS, SCATTERS, TALL
    )
    if expert >= num_experts:
        return
    output = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    total = multiply_blocks(
        x_ptr + source * inputs,
        x_scales_ptr + source * groups,
        inside,
        codes_ptr + expert * outputs * inputs,
        scales_ptr + expert * output_blocks * groups,
        output,
        outputs,
        inputs,
        groups,
        tl.program_id(2),
        per_split,
        GROUP,
        HIGH,
        NATIVE,
        TALL,
        WIDE,
        DEEP,
    )
    _store(total, bias_ptr, factors_ptr, out_ptr, expert, inside, pair, target, output, outputs, num_pairs, SCATTERS)
