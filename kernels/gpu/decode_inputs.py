"""Triton kernels of `kernels.decode_inputs`."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import kernel, tl


@kernel
def copy_tables_kernel(
    lane_rows_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy one tile of one lane's table per program; skip tiles beyond the row's last block."""
    lane = tl.program_id(0)
    row = tl.load(lane_rows_ptr + lane)
    num_blocks = tl.load(computed_ptr + lane) // BLOCK_SIZE + 1
    first = tl.program_id(1) * TILE
    if (row < 0) | (first >= num_blocks):
        return
    index = first + tl.arange(0, TILE)
    inside = index < num_blocks
    blocks = tl.load(tables_ptr + row.to(tl.int64) * table_stride + index, mask=inside, other=0)
    tl.store(out_ptr + lane.to(tl.int64) * out_stride + index, blocks, mask=inside)


@kernel
def prepare_decode_kernel(
    lane_rows_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    last_token_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    table_stride: tl.tensor,
    no_row: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Write all inputs of one lane, except its table, per program."""
    lane = tl.program_id(0)
    row = tl.load(lane_rows_ptr + lane)
    if row < 0:
        zero = tl.cast(row * 0, tl.int64)
        tl.store(input_ids_ptr + lane, zero)
        tl.store(positions_ptr + lane, zero)
        tl.store(slot_mapping_ptr + lane, zero - 1)
        tl.store(rows_ptr + lane, zero + no_row)
        tl.store(context_lens_ptr + lane, 0)
        return
    position = tl.load(computed_ptr + lane)
    block = tl.load(tables_ptr + row.to(tl.int64) * table_stride + position // BLOCK_SIZE).to(tl.int64)
    tl.store(input_ids_ptr + lane, tl.load(last_token_ptr + row))
    tl.store(positions_ptr + lane, position.to(tl.int64))
    tl.store(slot_mapping_ptr + lane, block * BLOCK_SIZE + position % BLOCK_SIZE)
    tl.store(rows_ptr + lane, row.to(tl.int64))
    tl.store(context_lens_ptr + lane, position + 1)
    tl.store(computed_ptr + lane, position + 1)
