"""The AVX-512 and AMX levels without the processor: their source compiled over a model of each instruction.

`avx512_model.h` and `amx_model.h` define the instructions' semantics. They do not prove that the compiler encodes the
instructions correctly.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kernels import gguf
from kernels.kv_quantised import INT4
from kernels.linear import linear_reference, quantised_linear_reference
from kernels.native import library
from kernels.native.attention import paged_attention_native
from kernels.native.sampling import sample_native
from kernels.native.selftest import failure
from kernels.native.serving import native
from kernels.paged_attention import paged_attention_reference
from tests.kernels.batches import as_float64, paged_batch
from tests.kernels.rounding import assert_drawn
from tests.kernels.test_gguf import drawn
from tests.kernels.test_linear import LEVELS, packed, quantised, quantised_int4, relative_error
from tests.kernels.test_sampling import sampling

COMPILER = shutil.which("g++")
SOURCES = Path(library.__file__).parent / "src"
pytestmark = [
    pytest.mark.skipif(COMPILER is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"),
    pytest.mark.skipif(native() is None, reason="the CPU kernels do not serve here"),
]


@pytest.fixture(scope="module")
def modelled_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library whose AVX-512 and AMX levels compute by the model."""
    folder = tmp_path_factory.mktemp("modelled")

    def compiled(source: Path) -> str:
        over_model = source.name in ("level_avx512.cpp", "level_amx.cpp")
        flags = ["-std=c++17", "-O0", "-fPIC", "-w", f"-DQUIRE_X86_LEVELS={int(over_model)}"]
        if over_model:
            flags += ["-mavx2", "-mfma", "-mf16c"]
            for model in ("avx512_model.h", "amx_model.h"):
                flags += ["-include", str(Path(__file__).with_name(model))]
        out = str(folder / f"{source.stem}.o")
        subprocess.run([COMPILER or "", *flags, "-c", str(source), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, sorted(SOURCES.glob("*.cpp"))))
    path = folder / "modelled.so"
    subprocess.run([COMPILER or "", "-shared", "-pthread", *objects, "-o", str(path)], check=True)
    loaded = ctypes.CDLL(str(path))
    library.declare(loaded)
    return loaded


@pytest.fixture(scope="module", params=["avx512", "amx"])
def modelled(modelled_library: ctypes.CDLL, request: pytest.FixtureRequest) -> library.Native:
    """One level that computes by the model."""
    return library.Native(modelled_library, request.param)


def test_the_self_test_passes(modelled: library.Native) -> None:
    """What decides whether the level serves finds nothing wrong with it."""
    assert failure(modelled) is None


def test_every_tile_gives_the_product(modelled: library.Native) -> None:
    """From one row to more than two tiles of rows, with inputs and outputs that fill no tile."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(150, 70, generator=generator)
    x = torch.randn(67, 70, generator=generator)
    bf16, int8, int4 = packed(weight.bfloat16()), quantised(weight), quantised_int4(weight)
    expected = linear_reference(x.bfloat16().double(), weight.bfloat16())
    expected_int8 = quantised_linear_reference(x.double(), weight)

    for rows in (*range(1, 28), 32, 33, 48, 67):
        assert relative_error(bf16(x[:rows], modelled), expected[:rows]) < 1e-5, rows
        assert relative_error(int8(x[:rows], modelled), expected_int8[:rows]) < 2e-2, rows
        assert torch.equal(int4(x[:rows], modelled), int4(x[:rows], LEVELS[0])), rows


@pytest.mark.parametrize("kind", gguf.BLOCK_BYTES)
def test_products_over_types_of_gguf_are_those_of_other_levels(modelled: library.Native, kind: str) -> None:
    """Bit for bit, for every number of rows of a tile."""
    linear = gguf.pack(kind, drawn(kind, 150, 256)[0])
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(3))

    for rows in (1, 2, 3, 4, 5, 9):
        assert torch.equal(linear(x[:rows], modelled), linear(x[:rows], LEVELS[0])), rows


def test_draws_are_those_of_the_reference(modelled: library.Native) -> None:
    """Flat and peaked rows, with and without filters, for a vocabulary that fills no block."""
    for spread in (0.0, 1.0, 6.0):
        logits = torch.randn(8, 1003, generator=torch.Generator().manual_seed(4)) * spread
        for filters in ({}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.7, "min_p": 0.01}):
            params = sampling(8, temperature=0.7, **filters)

            assert_drawn(sample_native(logits, params, modelled), logits, params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, INT4])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (20, None), (None, 30.0)])
def test_attention_equals_the_reference(
    modelled: library.Native, dtype: torch.dtype, window: int | None, cap: float | None
) -> None:
    """Rows in decode, chunks longer than a tile, contexts longer than a span, groups of seven heads."""
    rows = [(300, 1), (33, 1), (100, 40), (290, 15), (31, 2)]
    head_dim = 96 if dtype == INT4 else 80
    batch = paged_batch(rows, num_heads=14, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype)
    expected = paged_attention_reference(
        *as_float64(batch), max_query_len=batch.max_query_len, scale=0.125, sliding_window=window, soft_cap=cap
    )
    tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(torch.bfloat16).eps

    got = paged_attention_native(*batch.tensors, kernels=modelled, scale=0.125, sliding_window=window, soft_cap=cap)

    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)
