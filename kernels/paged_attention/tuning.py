"""Tile sizes and launch options for the attention kernels: a table in a file next to this module, and a safe default.

The table is measured offline on a GPU (`python -m measure.kernels.tune`) and checked in; nothing is tuned while
serving. An entry applies to one kernel on one architecture, for a head dimension (rounded up to ``dim_tile``) and a
number of bytes per cache element. Without an entry, a default applies that fits into the GPU's registers and shared
memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from kernels._dispatch import next_power_of_2

TABLE = Path(__file__).with_name("tuning.json")
_LARGE_SHARED_MEMORY = (90, 100, 103)
"""Architectures with 227 KiB of shared memory per program."""
_SMALL_SHARED_MEMORY = (86, 89)
"""Architectures below 120 with 99 KiB of shared memory per program; all from 120 on have 99 KiB too."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tile sizes and launch options for one specialisation of a kernel."""

    block_m: int  # minimum number of (query head, query) pairs in a tile
    block_n: int  # keys in a tile
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Key of a table entry."""

    kernel: str  # "decode" or "prefill"
    architecture: int  # compute capability, 90 for sm_90
    dim_tile: int  # head dimension, rounded up to a power of two
    kv_bytes: int  # bytes per cache element, 1 for int4; 4 if queries are float32


tried: dict[Key, Tuning] = {}
"""Candidates that `measure.kernels.tune` is measuring; empty while serving."""


def tuning_for(key: Key, group_size: int) -> Tuning:
    """Return the table entry or the default, with ``block_m`` raised to hold all query heads of one KV head."""
    found = tried.get(key) or _known(key)
    return Tuning(max(found.block_m, next_power_of_2(group_size)), found.block_n, found.num_warps, found.num_stages)


@cache  # every layer calls this
def _known(key: Key) -> Tuning:
    return read_table().get(key) or default_tuning(key)


def default_tuning(key: Key) -> Tuning:
    """Return launch options for a key that was not measured.

    The options follow from the compiler's reports on registers and shared memory. Rules: no spills, 16-byte copies into
    shared memory (from which the matrix units read), and three pipeline stages, so that one tile of keys and values is
    copied while another is computed. Decode is limited by memory bandwidth and therefore runs at least two programs per
    multiprocessor. Prefill reads each key once per tile of queries. On Hopper, where the L2 cache limits the matrix
    units, a tile has 128 rows in two warp groups. Blackwell data-centre GPUs have as much shared memory as Hopper and
    get the same tile. With 99 KiB of shared memory, large heads leave room for only two stages. Float32 does not use
    matrix units and needs more registers, so its tiles are small.
    """
    wide = key.kv_bytes > 2
    small = key.architecture in _SMALL_SHARED_MEMORY or key.architecture >= 120
    if key.kernel == "decode":
        # tl.dot needs at least 16 rows. Padding a smaller group costs nothing, because decode is limited by memory
        # bandwidth.
        largest = 64 if key.dim_tile <= 128 else 32 if key.dim_tile <= 256 else 16
        keys = (32 if key.dim_tile <= 64 else 16) if wide else largest
        return Tuning(16, keys, 4, 2 if small and wide and key.dim_tile > 256 else 3)
    if key.dim_tile > 256:
        return Tuning(16, 16, 8, 2) if wide else Tuning(32, 16, 8, 3)
    if wide:
        return Tuning(32, 16, 4 if key.dim_tile <= 64 else 8, 3)
    if key.kv_bytes == 1 and (key.architecture < 89 or key.dim_tile > 128):  # the conversion needs registers
        rows = 32 if key.architecture < 89 and key.dim_tile > 64 else 64
        return Tuning(rows, 32, 4 if key.dim_tile <= 128 else 8, 3)
    if key.dim_tile <= 64:
        return Tuning(64, 64, 4, 3)
    if key.architecture in _LARGE_SHARED_MEMORY:
        return Tuning(128, 64 if key.dim_tile <= 128 else 32, 8, 3)
    return Tuning(64, 32, 4 if key.dim_tile <= 128 else 8, 2 if small and key.dim_tile > 128 else 3)


@cache
def read_table() -> dict[Key, Tuning]:
    """Read the checked-in table."""
    return {Key(**entry["key"]): Tuning(**entry["tuning"]) for entry in json.loads(TABLE.read_text())}


def write_table(table: dict[Key, Tuning], path: Path = TABLE) -> None:
    """Write a table, one line per entry."""
    lines = [
        json.dumps({"key": asdict(key), "tuning": asdict(tuning)})
        for key, tuning in sorted(table.items(), key=lambda entry: entry[0])
    ]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
