"""Inputs of a decode step, computed on the device from the state that the device holds.

In decode every row has one input token, the last sampled token. A step's inputs follow from the decode rows, their
token counts, and the block tables. A captured graph starts with this kernel, so the host sends only changes.

A *lane* is a position in the batch. ``lane_rows`` ``[B]`` int32 contains each lane's row; -1 marks padding, because a
batch is padded to its graph's size. ``computed`` ``[B]`` int32 is the number of computed tokens in the lane's row. For
a lane with row r and n tokens:

    input_ids = last_token[r]      positions = n        slot_mapping = the slot of position n, by r's table
    context_lens = n + 1           rows = r             block_tables = the filled part of r's table

and ``computed`` becomes n + 1. A padding lane gets input token 0 at position 0, slot -1, context 0 and row
``num_rows``, which is the padding element in ``last_token``. A padding lane's row in ``block_tables`` is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._dispatch import runs_on_triton

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
        """Return views of the outputs for the first ``count`` lanes."""
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
    """Write the inputs of the next step into ``out`` and advance ``computed`` (rules: see the module).

    lane_rows, computed: ``[B]`` int32. last_token: ``[num_rows + 1]`` int64. tables: ``[num_rows, max_blocks]`` int32.
    """
    if not runs_on_triton(lane_rows):
        prepare_decode_reference(lane_rows, computed, last_token, tables, block_size, out)
        return
    num_lanes, max_blocks = lane_rows.shape[0], tables.shape[1]
    from kernels.gpu.decode_inputs import copy_tables_kernel, prepare_decode_kernel

    copy_tables_kernel[(num_lanes, -(-max_blocks // _TILE))](
        lane_rows,
        computed,
        tables,
        out.block_tables,
        tables.stride(0),
        out.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        TILE=_TILE,
    )
    prepare_decode_kernel[(num_lanes,)](
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
    """Plain torch form of `prepare_decode`, which is also the CPU path."""
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
