"""The table of tiles: listed shapes use their entry, and others use the default."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from kernels.paged_attention import tuning
from kernels.paged_attention.tuning import Key, Tuning, default_tuning, tuning_for
from measure.kernels import tune
from measure.kernels.aot import SHARED_BYTES


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own table, so that the checked-in one is left alone."""
    monkeypatch.setattr(tuning, "TABLE", tmp_path / "tuning.json")
    for name in ("read_table", "_known"):  # without their caches
        monkeypatch.setattr(tuning, name, getattr(tuning, name).__wrapped__)
    return tmp_path / "tuning.json"


def test_entries_are_used_where_they_hold(table: Path) -> None:
    """An entry applies only to its own key; other keys get the default. A larger group of heads gets a larger tile."""
    key = Key("decode", 90, 128, 2)
    tuning.write_table({key: Tuning(16, 128, 8, 2)}, table)

    assert tuning_for(key, 4) == Tuning(16, 128, 8, 2)
    assert tuning_for(key, 20) == Tuning(32, 128, 8, 2)
    other = Key("decode", 80, 128, 2)
    assert tuning_for(other, 4) == default_tuning(other)


def test_the_table_reads_as_it_was_written(table: Path) -> None:
    """The table that the tuner writes is read back unchanged, one line per entry in a fixed order."""
    found = {key: next(iter(tune.candidates(key))) for key in tune.keys(90) + tune.keys(80)}
    tuning.write_table(found, table)

    assert tuning.read_table() == found
    assert len(table.read_text().splitlines()) == len(found) + 2


def test_the_tuner_tries_the_default_first_and_everything_once() -> None:
    """No candidate is tried twice, and none has a tile that the kernels cannot have."""
    for key in tune.keys(90):
        tried = list(tune.candidates(key))
        assert tried[0] == default_tuning(key)
        assert len(tried) == len(set(tried))
        assert all(each.block_m >= 16 and each.block_n >= 16 for each in tried)


@pytest.mark.parametrize("architecture", [86, 89, 120, 121])
def test_default_tiles_fit_into_99_kib(architecture: int) -> None:
    """Queries, scores, and all stages but one of keys and values fit into shared memory.

    Triton allocates no more than that, and up to 128 bytes, if matrix products are not asynchronous. For bf16 this
    gives the figures for sm_80 in `measure/results/kernels-compiled.json`.
    """
    for kernel, dim_tile, kv_bytes in product(("decode", "prefill"), (64, 128, 256, 512), (1, 2, 4)):
        tile = default_tuning(Key(kernel, architecture, dim_tile, kv_bytes))
        queries_and_scores = (dim_tile + tile.block_n) * tile.block_m * max(kv_bytes, 2)
        keys_and_values = 2 * (tile.num_stages - 1) * tile.block_n * dim_tile * kv_bytes

        assert queries_and_scores + keys_and_values + 128 <= SHARED_BYTES[86], (kernel, dim_tile, kv_bytes, tile)


def test_the_shipped_table_names_kernels_that_there_are() -> None:
    """The checked-in table can be read, and holds only keys that a launch asks for."""
    assert all(key in tune.keys(key.architecture) for key in tuning.read_table())
