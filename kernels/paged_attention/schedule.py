"""Decode schedule: splits the keys of each row into shares, on the device, from the lengths of a batch.

A long row must be read by many programs in parallel, a short row by one. The split depends on all lengths, which only
the device knows in a captured graph. A small kernel therefore computes a *schedule*, which the attention of every layer
uses. A *share* is a range of one row's keys; program n of the attention computes share n. The size of shares is chosen
to give the GPU enough programs. All shares of a row have the same size, and there are at most ``R + wanted`` shares, so
that few programs of the grid are idle.

One schedule serves all layers with the same window and number of KV heads.
"""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._triton import kernel_with, num_multiprocessors, runs_on_triton, tl

_PROGRAMS_PER_SM = 4  # with a share; more than run at once, to shorten the tail
_UNIT = 64  # keys; a share is a number of units
_MIN_UNITS = 2  # below this, combining shares costs more than parallelism gains
_ROWS_TILE = 256
_FIELDS = 4


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """Shares of one batch.

    shares: ``[R + wanted, 4]`` int32: row (-1: unused), first key, end of the keys, number of shares of the row.
    rows: ``[R, 2]`` int32: first share and number of shares of the row; 0 shares for a row that is not in decode.
    """

    shares: torch.Tensor
    rows: torch.Tensor


def schedule_decode(
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_kv_heads: int,
    sliding_window: int | None = None,
) -> DecodeSchedule | None:
    """Return the schedule of a batch (query_start, context_lens: see the package); None if no kernel needs one.

    Rows with one token get shares; a row without keys (padding of a graph) gets one empty share.
    """
    if not runs_on_triton(context_lens):
        return None
    num_rows, device = context_lens.shape[0], context_lens.device
    wanted = -(-_PROGRAMS_PER_SM * num_multiprocessors(context_lens) // num_kv_heads)
    schedule = DecodeSchedule(
        shares=torch.empty(num_rows + wanted, _FIELDS, dtype=torch.int32, device=device),
        rows=torch.empty(num_rows, 2, dtype=torch.int32, device=device),
    )
    _schedule_kernel[(1,)](
        query_start,
        context_lens,
        schedule.shares,
        schedule.rows,
        num_rows,
        wanted,
        sliding_window or 0,
        WINDOWED=sliding_window is not None,
        UNIT=_UNIT,
        MIN_UNITS=_MIN_UNITS,
        ROWS_TILE=_ROWS_TILE,
        FIELDS=_FIELDS,
    )
    return schedule


@kernel_with(varying=("query_start_ptr", "context_lens_ptr", "num_rows", "wanted"))
def _schedule_kernel(
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    num_rows: tl.tensor,
    wanted: tl.tensor,
    sliding_window: tl.tensor,
    WINDOWED: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Compute the whole schedule in one program: the sum of all keys first, then every row's shares."""
    total = tl.cast(0, tl.int32)
    for first_row in range(0, num_rows, ROWS_TILE):
        row = first_row + tl.arange(0, ROWS_TILE)
        inside = row < num_rows
        start = tl.load(query_start_ptr + row, mask=inside, other=0)
        in_decode = inside & (tl.load(query_start_ptr + row + 1, mask=inside, other=0) - start == 1)
        keys = tl.load(context_lens_ptr + row, mask=in_decode, other=0)
        if WINDOWED:
            keys = tl.minimum(keys, sliding_window)
        total += tl.sum(tl.cdiv(keys, UNIT), 0)
    most_units = tl.maximum(tl.cdiv(total, wanted), MIN_UNITS)

    used = tl.cast(0, tl.int32)
    for first_row in range(0, num_rows, ROWS_TILE):
        row = first_row + tl.arange(0, ROWS_TILE)
        inside = row < num_rows
        start = tl.load(query_start_ptr + row, mask=inside, other=0)
        in_decode = inside & (tl.load(query_start_ptr + row + 1, mask=inside, other=0) - start == 1)
        end = tl.load(context_lens_ptr + row, mask=in_decode, other=0)
        begin = end * 0
        if WINDOWED:
            begin = tl.maximum(end - sliding_window, 0)
        units = tl.cdiv(end - begin, UNIT)
        count = tl.where(in_decode, tl.maximum(tl.cdiv(units, most_units), 1), 0)
        size = tl.cdiv(units, tl.maximum(count, 1)) * UNIT  # equal for all shares of a row
        # Rounding up may leave the last shares without a key.
        count = tl.where(in_decode, tl.maximum(tl.cdiv(end - begin, tl.maximum(size, 1)), 1), 0)
        first = used + tl.cumsum(count, 0) - count
        tl.store(rows_ptr + row * 2, first, mask=inside)
        tl.store(rows_ptr + row * 2 + 1, count, mask=inside)
        for share in range(tl.max(count, 0)):
            there = share < count
            place = shares_ptr + (first + share) * FIELDS
            low = begin + share * size
            tl.store(place, row, mask=there)
            tl.store(place + 1, low, mask=there)
            tl.store(place + 2, tl.minimum(low + size, end), mask=there)
            tl.store(place + 3, count, mask=there)
        used += tl.sum(count, 0)
    for first_share in range(used, num_rows + wanted, ROWS_TILE):
        share = first_share + tl.arange(0, ROWS_TILE)
        tl.store(shares_ptr + share * FIELDS, -1, mask=share < num_rows + wanted)
