"""Inputs of a decode step, computed on the device from the state there.

In decode every row has one token, the last sampled one. The inputs of a step follow from the decode rows, their numbers
of tokens, and the block tables. A captured graph starts with this kernel, so that the host sends only changes.

A *lane* is a place in the batch. ``lane_rows`` ``[B]`` int32 is the row of each lane; -1 marks padding, because a batch
is padded to the size of its graph. ``computed`` ``[B]`` int32 is the number of computed tokens of the lane's row. For a
lane with row r and n tokens:

    input_ids = last_token[r]      positions = n        slot_mapping = the slot of position n, by r's table
    context_lens = n + 1           rows = r             block_tables = r's table, as far as it is filled

and ``computed`` becomes n + 1. A lane of padding gets input 0 at position 0, slot -1, context 0 and row ``num_rows``,
which is the padding element of ``last_token``. Its line of ``block_tables`` is not changed.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._triton import kernel, runs_on_triton, tl

_TILE = 1024  # table entries per program


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Outputs of `prepare_decode`, one entry per lane."""

    input_ids: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64
    slot_mapping: torch.Tensor  # [B] int64
    rows: torch.Tensor  # [B] int64
    context_lens: torch.Tensor  # [B] int32
    block_tables: torch.Tensor  # [B, max_blocks] int32

    def lanes(self, count: int) -> DecodeInputs:
        """Return views of the first ``count`` lanes."""
        return DecodeInputs(
            self.input_ids[:count],
            self.positions[:count],
            self.slot_mapping[:count],
            self.rows[:count],
            self.context_lens[:count],
            self.block_tables[:count],
        )


def prepare_decode(
    lane_rows: torch.Tensor,
    computed: torch.Tensor,
    last_token: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """Write the inputs of the next step into ``out`` and advance ``computed``, as described in the module.

    lane_rows, computed: ``[B]`` int32. last_token: ``[num_rows + 1]`` int64. tables: ``[num_rows, max_blocks]`` int32.
    """
    if not runs_on_triton(lane_rows):
        prepare_decode_reference(lane_rows, computed, last_token, tables, block_size, out)
        return
    num_lanes, max_blocks = lane_rows.shape[0], tables.shape[1]
    _copy_tables_kernel[(num_lanes, -(-max_blocks // _TILE))](
        lane_rows,
        computed,
        tables,
        out.block_tables,
        tables.stride(0),
        out.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
    )
    _prepare_decode_kernel[(num_lanes,)](
        lane_rows,
        computed,
        last_token,
        tables,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.rows,
        out.context_lens,
        tables.stride(0),
        last_token.shape[0] - 1,
        BLOCK_SIZE=block_size,
    )


def prepare_decode_reference(
    lane_rows: torch.Tensor,
    computed: torch.Tensor,
    last_token: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    out: DecodeInputs,
) -> None:
    """Plain torch form of `prepare_decode`; also the CPU path."""
    active = lane_rows >= 0
    rows = torch.where(active, lane_rows, 0).long()
    position = torch.where(active, computed, 0).long()
    block = tables[rows].gather(1, (position // block_size).unsqueeze(1)).squeeze(1).long()
    out.input_ids.copy_(torch.where(active, last_token[rows], 0))
    out.positions.copy_(position)
    out.slot_mapping.copy_(torch.where(active, block * block_size + position % block_size, -1))
    out.rows.copy_(torch.where(active, rows, last_token.shape[0] - 1))
    out.context_lens.copy_(torch.where(active, computed + 1, 0))
    filled = torch.arange(tables.shape[1], device=tables.device) <= (position // block_size).unsqueeze(1)
    out.block_tables.copy_(torch.where(active.unsqueeze(1) & filled, tables[rows], out.block_tables))
    computed.copy_(torch.where(active, computed + 1, computed))


@kernel
def _copy_tables_kernel(
    lane_rows_ptr: tl.tensor,
    computed_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    out_ptr: tl.tensor,
    table_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Copy a tile of one lane's table per program; tiles beyond the row's last block are skipped."""
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
def _prepare_decode_kernel(
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
