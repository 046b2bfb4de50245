"""Kernels compiled for the GPUs we serve on, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels._dispatch import record_launches
from kernels.activation import silu_mul
from kernels.paged_attention.tuning import Key, tuning_for
from kernels.sampling_triton.launch import TILE, TILES_PER_PROGRAM
from measure.kernels import aot, machine_code

pytest.importorskip("triton", reason="compiling kernels needs triton")

ROOT = Path(__file__).parents[2]

MOST_PER_SCORE = {("prefill", 80): 49, ("prefill", 90): 18, ("decode", 80): 67, ("decode", 90): 84}
"""Ceilings of the instructions of all threads per query and key of a tile, for bf16 and head dimension 128; a seventh
above those of Triton 3.9 with the tiles of the tuning table."""

TOKENS_PER_PROGRAM = {
    "maxima_kernel": TILE * TILES_PER_PROGRAM,
    "pivots_kernel": TILE * TILES_PER_PROGRAM,
    "gather_kernel": TILE,
    "draw_tiles_kernel": TILE,
}
"""Number of vocabulary tokens for which each instruction of a sampling kernel runs once."""

MOST_PER_TOKEN = {"maxima_kernel": 14, "pivots_kernel": 190, "gather_kernel": 160, "draw_tiles_kernel": 177}
"""Upper limits for all threads' instructions per vocabulary token; a seventh above Triton 3.9's numbers."""

MOST_INSTRUCTIONS = {
    "weight_only_kernel": 1862,
    "weight_only_experts_kernel": 2106,
    "fp8_linear_kernel": 3421,
    "fp8_experts_kernel": 3740,
}
"""Upper limits for the instructions of a whole kernel; a seventh above those of Triton 3.9."""
MOST_FOR_NVFP4 = {"weight_only_kernel": 3140, "weight_only_experts_kernel": 3332}
"""The same for NVFP4, whose scales for 16 inputs are converted from e4m3."""

PIPELINED = """
  %a = ttg.async_wait %t {num = 1 : i32}
  %b = scf.for %i = %c0 to %n step %c1 iter_args(%x = %y) -> (i32) {
    %c = ttg.async_wait %t, %u {num = 2 : i32}
    %d = scf.if %p -> (i32) {
      scf.yield %c : i32
    } else {
      scf.yield %x : i32
    }
    scf.yield %d : i32
  }
  %e = ttg.async_wait {num = 0 : i32}
"""


LISTING = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   LDGSTS.E.128 [R4], desc[UR4][R2.64] ;
        /*0020*/              @P0  BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   BRA `(.L_x_1);
        /*0050*/                   NOP;
        /*0060*/                   NOP;
"""


@pytest.mark.parametrize("case", [case for case in aot.cases() if case.in_ci], ids=lambda case: case.name)
def test_device_path_never_reads_a_value_back(case: aot.Case) -> None:
    """Every operation launches its kernels from shapes alone: it runs on meta tensors, which have no values."""
    with record_launches() as launches:
        case.call()

    assert launches


def test_recording_ends_with_its_block() -> None:
    """Only launches made inside the block are noted; outside, meta tensors go the CPU way."""
    gate_up = torch.empty(3, 64, device="meta")
    with record_launches() as launches:
        silu_mul(gate_up)
    outside = silu_mul(gate_up)

    assert [launch.kernel.name for launch in launches] == ["silu_mul_kernel"]
    assert outside.shape == (3, 32)


def test_only_waits_within_loops_count() -> None:
    """A loop that waits for all its copies has none ahead. Waits before and after it do not matter, even in a loop."""
    assert machine_code.copies_ahead(PIPELINED) == 2
    assert machine_code.copies_ahead(PIPELINED.replace("num = 2", "num = 0")) == 0
    assert machine_code.copies_ahead(PIPELINED + PIPELINED.replace("num = 2", "num = 1")) == 1
    assert machine_code.copies_ahead("scf.for %i = %c0 to %n {\n" + PIPELINED + "}") == 2
    assert machine_code.copies_ahead("  %a = ttg.async_wait %t {num = 1 : i32}") is None


def test_instructions_are_counted_without_padding() -> None:
    """A kernel's instructions are counted without trailing padding; a loop counts if it copies."""
    assert machine_code.num_instructions(LISTING) == 5
    assert machine_code.loop_instructions(LISTING) == (2,)


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Compile cases in a process that does not interpret kernels; return the rows of the table."""
    report = folder / "aot.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "measure.kernels.aot", "--json", str(report), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    rows: list[dict[str, Any]] = json.loads(report.read_text())["kernels"]
    return rows


def check_resources(rows: list[dict[str, Any]]) -> None:
    """Check registers, shared memory, and the instructions of products with quantised weights."""
    # Triton versions differ by one or two registers, but a kernel that exceeds its registers spills hundreds of bytes.
    assert [row for row in rows if row["spill_bytes"] > 32] == []
    assert [row for row in rows if row["shared_bytes"] > aot.SHARED_BYTES[row["architecture"]]] == []
    for row in rows:
        if row["kernel"] in MOST_INSTRUCTIONS:
            is_nvfp4 = "nvfp4" in row["case"] or "scales in e4m3" in row["case"]
            most = MOST_FOR_NVFP4 if is_nvfp4 and row["kernel"] in MOST_FOR_NVFP4 else MOST_INSTRUCTIONS
            assert row["instructions"] <= most[row["kernel"]], row


@pytest.mark.release
def test_products_with_quantised_weights_compile_for_other_gpus(tmp_path: Path) -> None:
    """They also compile for sm_89, sm_100 and sm_120, fit in shared memory, and spill no register."""
    rows = compiled(tmp_path, "--only", "weights", "--architectures", "89,100,120")

    assert {(row["kernel"], row["architecture"]) for row in rows} >= set(product(MOST_INSTRUCTIONS, (89, 100, 120)))
    check_resources(rows)


@pytest.mark.release
def test_ci_specialisations_compile(tmp_path: Path) -> None:
    """The CI cases compile for sm_80 and sm_90, fit in shared memory, and spill no register.

    The attention kernels load ahead of their arithmetic, and need no more instructions per score than before. The
    sampling kernels need no more instructions per vocabulary token than before.
    """
    rows = compiled(tmp_path)

    assert {row["architecture"] for row in rows} == {80, 90}
    assert {row["kernel"] for row in rows} >= {
        "write_kv_kernel",
        "prefill_kernel",
        "decode_kernel",
        "schedule_kernel",
        "combine_parts_kernel",
        "copy_blocks_kernel",
        "rms_norm_kernel",
        "rotary_kernel",
        "silu_mul_kernel",
        "grouped_product_kernel",
        "route_kernel",
        "sort_pairs_kernel",
        "rotate_and_cache_kernel",
        "maxima_kernel",
        "pivots_kernel",
        "gather_kernel",
        "select_kernel",
        "draw_tiles_kernel",
        "draw_rows_kernel",
        "scatter_words_kernel",
        "mask_tokens_kernel",
        "prepare_decode_kernel",
    }
    check_resources(rows)
    assert {row["kernel"] for row in rows if "nvfp4" in row["case"] or "e4m3, 512" in row["case"]} >= set(
        MOST_FOR_NVFP4
    )

    attention = [row for row in rows if row["kernel"] in ("prefill_kernel", "decode_kernel")]
    assert [row for row in attention if not row["copies_ahead"]] == []  # loads overlap arithmetic
    counted = [row for row in attention if row["case"] == "attention bf16, head_dim 128, group 4, page 16"]
    assert len(counted) == len(MOST_PER_SCORE)
    for row in counted:
        name, architecture = row["kernel"].removesuffix("_kernel"), row["architecture"]
        tile = tuning_for(Key(name, architecture, 128, 2), 4)
        per_score = max(row["loop_instructions"]) * 32 * row["num_warps"] / (tile.block_m * tile.block_n)
        assert per_score <= MOST_PER_SCORE[name, architecture], row

    sampling = [row for row in rows if row["kernel"] in TOKENS_PER_PROGRAM]
    assert {(row["kernel"], row["architecture"]) for row in sampling} == set(product(TOKENS_PER_PROGRAM, (80, 90)))
    for row in sampling:
        per_token = row["instructions"] * 32 * row["num_warps"] / TOKENS_PER_PROGRAM[row["kernel"]]
        assert per_token <= MOST_PER_TOKEN[row["kernel"]], row


def test_at_most_42_cases_are_compiled() -> None:
    """CI compiles at most 40 cases, each once."""
    names = [case.name for case in aot.cases()]

    assert len(names) == len(set(names))
    assert 0 < len([case for case in aot.cases() if case.in_ci]) <= 42
