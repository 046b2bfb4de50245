"""The kernel for `schedule`, which splits the keys of decode rows among programs."""

# ruff: noqa: N803 - compile-time parameters of kernels are upper case, as everywhere in Triton

from __future__ import annotations

from kernels._triton import jit, kernel_with, tl


@kernel_with(varying=("query_start_ptr", "context_lens_ptr", "num_rows", "num_programs"))
def schedule_kernel(
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    shares_ptr: tl.tensor,
    programs_ptr: tl.tensor,
    finished_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_programs: tl.tensor,
    sliding_window: tl.tensor,
    WINDOWED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Compute the whole schedule in one program: first the total number of units, then the shares of each row."""
    total = tl.cast(0, tl.int32)
    for first_row in range(0, num_rows, ROWS_TILE):
        row = first_row + tl.arange(0, ROWS_TILE)
        _, _, _, units = _units_of_rows(
            query_start_ptr, context_lens_ptr, row, num_rows, sliding_window, WINDOWED, UNIT
        )
        total += tl.sum(units, 0)
    size = tl.maximum(tl.cdiv(total, num_programs), MIN_UNITS)  # units per program

    used_units = tl.cast(0, tl.int32)
    used_shares = tl.cast(0, tl.int32)
    for first_row in range(0, num_rows, ROWS_TILE):
        row = first_row + tl.arange(0, ROWS_TILE)
        token, low, end, units = _units_of_rows(
            query_start_ptr, context_lens_ptr, row, num_rows, sliding_window, WINDOWED, UNIT
        )
        first_unit = used_units + tl.cumsum(units, 0) - units
        first_program = first_unit // size
        count = tl.where(units > 0, (first_unit + units - 1) // size - first_program + 1, 0)
        first_share = used_shares + tl.cumsum(count, 0) - count
        for index in range(tl.max(count, 0)):
            there = index < count
            program = first_program + index
            unit = tl.maximum(program * size, first_unit)
            begin = low + (unit - first_unit) * UNIT
            place = shares_ptr + (first_share + index) * FIELDS
            tl.store(place, row, mask=there)
            tl.store(place + 1, begin, mask=there)
            tl.store(place + 2, tl.minimum(low + ((program + 1) * size - first_unit) * UNIT, end), mask=there)
            tl.store(place + 3, first_share, mask=there)
            tl.store(place + 4, count, mask=there)
            tl.store(place + 5, token, mask=there)
            tl.store(programs_ptr + program, first_share + index, mask=there & (unit == program * size))
        for kv_head in range(NUM_KV_HEADS):
            tl.store(finished_ptr + row * NUM_KV_HEADS + kv_head, 0, mask=row < num_rows)
        used_units += tl.sum(units, 0)
        used_shares += tl.sum(count, 0)
    for first_program in range(tl.cdiv(total, size), num_programs + 1, ROWS_TILE):  # these programs have no share
        program = first_program + tl.arange(0, ROWS_TILE)
        tl.store(programs_ptr + program, used_shares, mask=program <= num_programs)


@jit
def _units_of_rows(
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    row: tl.tensor,
    num_rows: tl.tensor,
    sliding_window: tl.tensor,
    WINDOWED: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tuple:
    """Return each row's token, first key, end of keys and number of units, which is 0 for rows that do not decode."""
    inside = row < num_rows
    token = tl.load(query_start_ptr + row, mask=inside, other=0)
    in_decode = inside & (tl.load(query_start_ptr + row + 1, mask=inside, other=0) - token == 1)
    end = tl.load(context_lens_ptr + row, mask=in_decode, other=0)
    low = end * 0
    if WINDOWED:
        low = tl.maximum(end - sliding_window, 0)
    return token, low, end, tl.where(in_decode, tl.maximum(tl.cdiv(end - low, UNIT), 1), 0)
