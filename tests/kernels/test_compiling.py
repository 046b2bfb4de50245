"""Who asks is told of each kernel before it is compiled, and of none that is compiled already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiling kernels needs triton")

ROOT = Path(__file__).parents[2]

# Triton asks its driver for which device to compile; a device that nobody launches on need not exist.
PROGRAM = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from kernels._triton import record_launches
from kernels.activation import silu_mul
from kernels.compiling import before_compiling

class Device:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def launch(dtype):
    with record_launches() as launches:
        silu_mul(torch.empty(3, 64, dtype=dtype, device="meta"))
    (made,) = launches
    arguments = [triton.runtime.jit.MockTensor(a.dtype) if isinstance(a, torch.Tensor) else a for a in made.args]
    made.kernel.function.warmup(*arguments, grid=made.grid, **made.options)

triton.runtime.driver.set_active(Device())
launch(torch.float32)
with before_compiling(lambda name: print("about to compile", name)):
    print("again"); launch(torch.float32)
    print("new type"); launch(torch.float16)
    print("again"); launch(torch.float16)
print("outside"); launch(torch.bfloat16)
"""


def test_each_new_specialisation_is_told_once(tmp_path: Path) -> None:
    """Only a launch that compiles is told, before it does, and only inside the block."""
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )

    assert process.returncode == 0, process.stderr[-4000:]
    assert process.stdout.splitlines() == [
        "again",
        "new type",
        "about to compile silu_mul_kernel",
        "again",
        "outside",
    ]
