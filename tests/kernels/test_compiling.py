"""A caller is notified before each kernel's compilation, but not for kernels that are already compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiling kernels needs triton")

ROOT = Path(__file__).parents[2]

# Triton asks its driver for the device to compile for. The device need not exist, because nothing is launched on it.
PROGRAM = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from kernels._dispatch import record_launches
from kernels.activation import silu_mul
from kernels.compiling import before_compiling

class Device:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def launch_all(call):
    with record_launches() as launches:
        call()
    for made in launches:
        arguments = [triton.runtime.jit.MockTensor(a.dtype) if isinstance(a, torch.Tensor) else a for a in made.args]
        made.kernel.function.warmup(*arguments, grid=made.grid, **made.options)

def launch(dtype):
    launch_all(lambda: silu_mul(torch.empty(3, 64, dtype=dtype, device="meta")))

triton.runtime.driver.set_active(Device())
"""
NEW_TYPES = """
launch(torch.float32)
with before_compiling(lambda name: print("about to compile", name)):
    print("again"); launch(torch.float32)
    print("new type"); launch(torch.float16)
    print("again"); launch(torch.float16)
print("outside"); launch(torch.bfloat16)
"""
NEW_SIZES = """
from kernels.norm import rms_norm
from kernels.scatter import scatter_words

def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

with before_compiling(lambda name: print("about to compile", name)):
    for rows in (17, 1, 16):
        print(rows)
        launch_all(lambda: rms_norm(meta(rows, 64), meta(64), 1e-6))
        launch_all(lambda: scatter_words(meta(500, dtype=torch.int32), meta(2, rows, dtype=torch.int32)))
"""


def run(program: str, cache: Path) -> list[str]:
    """Run a program that compiles kernels with a separate cache; return its output lines."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM + program],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return process.stdout.splitlines()


def test_each_new_specialisation_is_reported_once(tmp_path: Path) -> None:
    """Only a launch that compiles is reported, before it compiles, and only inside the block."""
    assert run(NEW_TYPES, tmp_path) == [
        "again",
        "new type",
        "about to compile silu_mul_kernel",
        "again",
        "outside",
    ]


def test_sizes_that_vary_compile_nothing_anew(tmp_path: Path) -> None:
    """What changes from step to step is declared so: one row, sixteen and seventeen run the same kernel."""
    assert run(NEW_SIZES, tmp_path) == [
        "17",
        "about to compile rms_norm_kernel",
        "about to compile scatter_words_kernel",
        "1",
        "16",
    ]
