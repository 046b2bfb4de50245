"""Decode schedule: splits a batch's keys into equal parts, one per program of the attention kernel.

The attention kernel launches as many programs as the GPU runs at a time, and each program reads the same number of
keys. The split depends on all rows' lengths, which only the device knows in a captured graph. A small kernel therefore
computes a *schedule* on the device. It concatenates all rows' keys and splits them into equal parts. A *share* is the
range of one row's keys within one part. A program computes consecutive shares.

All layers with the same window and number of KV heads use one schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels._dispatch import num_multiprocessors, runs_on_triton

_PROGRAMS_PER_SM = 2
"""Programs per multiprocessor, all resident at once; 2 is fastest on an H100 (1, 8 and 64 rows of 1,024 tokens)."""
_UNIT = 64
"""Keys per unit; a share begins at a multiple of this within its row."""
_MIN_UNITS = 2
"""Minimum number of units per program; with fewer, combining shares costs more than parallelism gains."""
_ROWS_TILE = 256
"""Rows that the schedule kernel reads at a time."""
_FIELDS = 8
"""Number of integers that describe a share; a power of two."""


@dataclass(frozen=True, slots=True)
class DecodeSchedule:
    """Shares of one batch.

    shares: ``[R + P, 8]`` int32: row, first key, end of the keys, the row's first share, the row's number of shares,
        token; two fields are unused.
    programs: ``[P + 1]`` int32: program p computes the shares ``programs[p]`` .. ``programs[p + 1]``.
    finished: ``[R, num_kv_heads]`` int32: zeros; counts finished shares while attention runs.
    """

    shares: torch.Tensor
    programs: torch.Tensor
    finished: torch.Tensor


def schedule_decode(
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    num_kv_heads: int,
    sliding_window: int | None = None,
) -> DecodeSchedule | None:
    """Return the schedule for a batch (query_start, context_lens: see the package); None if no kernel needs one.

    Rows with one token get shares. A row with one token but no keys (an empty lane in a decode graph) gets one empty
    share. Rows without a token (padding in a mixed graph) get none.
    """
    if not runs_on_triton(context_lens):
        return None
    num_rows, device = context_lens.shape[0], context_lens.device
    num_programs = max(1, _PROGRAMS_PER_SM * num_multiprocessors(context_lens) // num_kv_heads)
    schedule = DecodeSchedule(
        shares=torch.empty(num_rows + num_programs, _FIELDS, dtype=torch.int32, device=device),
        programs=torch.empty(num_programs + 1, dtype=torch.int32, device=device),
        finished=torch.empty(num_rows, num_kv_heads, dtype=torch.int32, device=device),
    )
    from kernels.paged_attention.schedule_kernel import schedule_kernel

    schedule_kernel[(1,)](
        query_start,
        context_lens,
        schedule.shares,
        schedule.programs,
        schedule.finished,
        num_rows,
        num_programs,
        sliding_window or 0,
        WINDOWED=sliding_window is not None,
        NUM_KV_HEADS=num_kv_heads,
        UNIT=_UNIT,
        MIN_UNITS=_MIN_UNITS,
        ROWS_TILE=_ROWS_TILE,
        FIELDS=_FIELDS,
    )
    return schedule
