"""Operations of both attention kernels on a tile of keys: gather the tile, score it, update the online softmax.

An 8-bit cache is read as pairs of elements (uint16). The low elements of all pairs are the operand of one product, and
the high elements the operand of another. Queries and results therefore have the even dimensions in one tensor, and the
odd dimensions in another. Scores are multiplied by their key's scale, and weights by their value's scale
(`kernels.kv_quantised`).

An int4 cache is read as bytes (uint8), each with two codes that are 16 dimensions apart. Queries and results are
divided likewise (`dims_of`). Codes are converted to elements in registers, with the scale and zero of their group.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, tl
from kernels.gpu.fp8 import floats_from_fp8_pairs, floats_from_int8_pairs


@jit
def dims_of(dim: tl.tensor, CACHE_TYPE: tl.constexpr) -> tl.tensor:
    """Return the head dimension of the low element of each pair, or of each element if there are no pairs.

    The high element of a pair follows one dimension later, or 16 dimensions later with int4.
    """
    if CACHE_TYPE == tl.uint8:  # noqa: SIM300 - evaluated by the compiler
        dims = dim // 16 * 32 + dim % 16
    elif CACHE_TYPE == tl.uint16:  # noqa: SIM300
        dims = dim * 2
    else:
        dims = dim
    return dims


@jit
def load_block_ids(table_ptr: tl.tensor, position: tl.tensor, end: tl.tensor, BLOCK_SIZE: tl.constexpr) -> tl.tensor:
    """Return the block ids for some positions in one row; 0 for positions from ``end`` on."""
    return tl.load(table_ptr + position // BLOCK_SIZE, mask=position < end, other=0)


@jit
def gather_tile(
    cache_ptr: tl.tensor,
    block: tl.tensor,
    position: tl.tensor,
    inside: tl.tensor,
    kv_head: tl.tensor,
    dim: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return the keys or values at some positions of one row, ``[positions, DIM_TILE]``, without conversion.

    MASKED means that some positions may be outside the row; the result has zeros there.
    """
    KIND: tl.constexpr = cache_ptr.dtype.element_ty  # noqa: N806
    EXTRA: tl.constexpr = 2 if KIND == tl.uint16 else HEAD_DIM // 4 if KIND == tl.uint8 else 0  # noqa: N806, SIM300
    of_head = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * (BLOCK_SIZE * (HEAD_DIM + EXTRA))
    offset = of_head + (position % BLOCK_SIZE) * HEAD_DIM
    place = cache_ptr + offset[:, None] + dim[None, :]
    if MASKED or HEAD_DIM != DIM_TILE:
        mask = (dim < HEAD_DIM)[None, :]
        if MASKED:
            mask = mask & inside[:, None]
        tile = tl.load(place, mask=mask, other=0)
    else:
        tile = tl.load(place)
    return tile


@jit
def gather_scales(
    cache_ptr: tl.tensor,
    block: tl.tensor,
    position: tl.tensor,
    inside: tl.tensor,
    kv_head: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
) -> tl.tensor:
    """Return the scales of the keys or values at some positions ``[positions]``; 1 for a cache without scales.

    With int4, return each group's scale (low half) and zero, ``[positions, DIM_TILE // 16]`` uint32. HEAD_DIM is in
    elements of ``cache_ptr``, which are pairs. The result is 0 for positions outside the row.
    """
    if cache_ptr.dtype.element_ty == tl.uint8:
        GROUPS: tl.constexpr = HEAD_DIM // 16  # noqa: N806
        scales_ptr = cache_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
        # The codes of a group take as much space as four pairs of scale and zero.
        of_head = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * (BLOCK_SIZE * GROUPS * 5)
        place = of_head + BLOCK_SIZE * GROUPS * 4 + position % BLOCK_SIZE * GROUPS
        group = tl.arange(0, DIM_TILE // 16)
        mask = inside[:, None] & (group < GROUPS)[None, :]
        scales = tl.load(scales_ptr + place[:, None] + group[None, :], mask=mask, other=0)
    elif cache_ptr.dtype.element_ty == tl.uint16:
        scales_ptr = cache_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
        # Two pairs take as much space as one scale.
        of_head = (block.to(tl.int64) * NUM_KV_HEADS + kv_head) * (BLOCK_SIZE * (HEAD_DIM // 2 + 1))
        place = of_head + BLOCK_SIZE * (HEAD_DIM // 2) + position % BLOCK_SIZE
        scales = tl.load(scales_ptr + place, mask=inside, other=0.0)
    else:
        scales = tl.full(position.shape, 1.0, tl.float32)
    return scales


@jit
def floats_from_pairs(pairs: tl.tensor, NATIVE_FP8: tl.constexpr, INT8: tl.constexpr) -> tl.tuple:
    """Return the low and the high elements of pairs of int8 or fp8 as float16."""
    if INT8:
        even, odd = floats_from_int8_pairs(pairs)
    else:
        even, odd = floats_from_fp8_pairs(pairs, NATIVE_FP8)
    return even, odd


@jit
def floats_from_groups(pairs: tl.tensor, scales: tl.tensor) -> tl.tuple:
    """Return the low and the high elements of int4 pairs, from `gather_tile` and `gather_scales`, as float32."""
    groups = tl.reshape(pairs, (scales.shape[0], scales.shape[1], 16))
    scale = (scales & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, :, None]
    zero = (scales >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)[:, :, None]
    low = (groups & 15).to(tl.float32) * scale + zero
    high = (groups >> 4).to(tl.float32) * scale + zero
    return tl.reshape(low, pairs.shape), tl.reshape(high, pairs.shape)


@jit
def as_factor(query: tl.tensor, CACHE_TYPE: tl.constexpr) -> tl.tensor:
    """Convert queries to the dtype in which they are multiplied by the keys.

    For a quantised cache this is float16 instead of bfloat16: GPUs convert e4m3 to float16 in one instruction, and the
    scales and zeros of int4 are float16.
    """
    QUANTISED: tl.constexpr = CACHE_TYPE == tl.uint16 or CACHE_TYPE == tl.uint8  # noqa: N806, SIM300
    return query.to(tl.float16) if QUANTISED and query.dtype == tl.bfloat16 else query


@jit
def score_tile(
    query: tl.tensor,
    query_odd: tl.tensor,
    keys: tl.tensor,
    key_scales: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    CAPPED: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    INT8: tl.constexpr,
) -> tl.tensor:
    """Return scores, which `accumulate` multiplies by `score_factor`; ``query_odd`` is used if quantised."""
    if keys.dtype == tl.uint8:
        even, odd = floats_from_groups(keys, key_scales)
        scores = tl.dot(query, tl.trans(even.to(query.dtype)), input_precision="ieee")
        scores = tl.dot(query_odd, tl.trans(odd.to(query.dtype)), scores, input_precision="ieee")
    elif keys.dtype == tl.uint16:
        even, odd = floats_from_pairs(keys, NATIVE_FP8, INT8)
        scores = tl.dot(query, tl.trans(even.to(query.dtype)), input_precision="ieee")
        scores = tl.dot(query_odd, tl.trans(odd.to(query.dtype)), scores, input_precision="ieee")
        scores = scores * key_scales[None, :]
    else:
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
    if CAPPED:
        scores = soft_cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scale * scores / soft_cap)))
    return scores


@jit
def score_factor(scale: tl.tensor, CAPPED: tl.constexpr) -> tl.tensor:
    """Return the positive factor that converts scores to logits times log2(e), because the softmax uses exp2."""
    return 1.4426950408889634 if CAPPED else scale * 1.4426950408889634


@jit
def begin_with_sink(
    sinks_ptr: tl.tensor, head: tl.tensor, inside: tl.tensor, is_first: tl.tensor, query: tl.tensor
) -> tl.tuple:
    """Return the row_max and row_sum of the online softmax after the sink, which acts as a key without a value.

    If a row is computed in several parts, only the first part includes the sink. ``row_sum`` has the same factor as in
    `accumulate`.
    """
    sink = tl.load(sinks_ptr + head, mask=inside, other=-float("inf")) * 1.4426950408889634
    one: tl.constexpr = 256.0 if query.dtype == tl.float16 else 1.0
    return tl.where(is_first, sink, -float("inf")), tl.where(is_first, tl.where(inside, one, 0.0), 0.0)


@jit
def accumulate(
    scores: tl.tensor,
    factor: tl.tensor,
    query: tl.tensor,
    values: tl.tensor,
    value_scales: tl.tensor,
    acc: tl.tensor,
    acc_odd: tl.tensor,
    row_max: tl.tensor,
    row_sum: tl.tensor,
    NATIVE_FP8: tl.constexpr,
    INT8: tl.constexpr,
) -> tl.tuple:
    """Update the online softmax with these keys; return the new acc, acc_odd, row_max and row_sum.

    The maximum is computed on unscaled scores, so that one FFMA scales a score and subtracts the maximum.
    ``row_sum`` and ``acc`` have a common factor: with float16 values it is 256, so that small probabilities do not
    underflow.
    """
    spare: tl.constexpr = 8.0 if query.dtype == tl.float16 else 0.0
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    base = tl.where(new_max == -float("inf"), 0.0, new_max)  # no key has been visible so far
    probs = tl.exp2(scores * factor - (base - spare)[:, None])
    shrink = tl.exp2(row_max - base)
    acc = acc * shrink[:, None]
    if values.dtype == tl.uint8:
        weights = probs.to(query.dtype)
        even, odd = floats_from_groups(values, value_scales)
        acc = tl.dot(weights, even.to(query.dtype), acc, input_precision="ieee")
        acc_odd = tl.dot(weights, odd.to(query.dtype), acc_odd * shrink[:, None], input_precision="ieee")
    elif values.dtype == tl.uint16:
        weights = (probs * value_scales[None, :]).to(query.dtype)
        even, odd = floats_from_pairs(values, NATIVE_FP8, INT8)
        acc = tl.dot(weights, even.to(query.dtype), acc, input_precision="ieee")
        acc_odd = tl.dot(weights, odd.to(query.dtype), acc_odd * shrink[:, None], input_precision="ieee")
    else:
        acc = tl.dot(probs.to(query.dtype), values.to(query.dtype), acc, input_precision="ieee")
    return acc, acc_odd, new_max, row_sum * shrink + tl.sum(probs, 1)
