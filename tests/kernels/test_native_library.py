"""The CPU kernels serve wherever they can: else all their tests would be skipped, and torch would compute unseen."""

from __future__ import annotations

import platform
import re
import runpy
import shutil
from pathlib import Path

import pytest

from kernels.native.library import native_levels
from kernels.native.serving import native
from tests.cpu_kernels import cpu_kernels
from worker_svc.model.hf_trial import InFloat32

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ on x86-64"
)


def test_where_there_is_a_compiler_the_kernels_are_built() -> None:
    """Installed where g++ is, with every level whose instructions the processor has."""
    flags = set(Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split())
    levels = [kernels.level_name for kernels in native_levels()]

    assert "portable" in levels
    assert ("avx2" in levels) == ({"avx2", "fma"} <= flags)
    assert ("avx512" in levels) == ({"avx512f", "avx512_bf16", "avx512_vnni"} <= flags)
    assert ("amx" in levels) == ({"amx_tile", "amx_bf16", "amx_int8"} <= flags)


def test_the_best_level_passes_its_self_test_and_serves() -> None:
    """Every level of the processor is used, except the portable one, which is only for tests."""
    best = native_levels()[-1].level_name
    with cpu_kernels("auto"):
        serving = native()

    assert (serving.level_name if serving is not None else "portable") == best


def test_the_self_test_does_not_depend_on_its_caller() -> None:
    """A trial that computes in float32 requests the kernels first; the self-test still sees its own types."""
    with cpu_kernels("auto"), InFloat32():  # type: ignore[no-untyped-call]
        serving = native()

    assert (serving.level_name if serving is not None else "portable") == native_levels()[-1].level_name


def test_a_process_chooses_once() -> None:
    """The kernels for which a model was packed at load serve it until the end, even if the environment changes."""
    with cpu_kernels("portable"), pytest.MonkeyPatch.context() as patch:
        chosen = native()
        patch.setenv("QUIRE_CPU_KERNELS", "off")

        assert chosen is not None
        assert native() is chosen


@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_a_level_runs_only_where_all_it_is_compiled_for_is_there(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is asked for exactly the instruction sets that the compiler may use."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    flags = runpy.run_path(str(ROOT / "setup.py"))["LEVEL_FLAGS"][f"level_{level}.cpp"]
    api = (ROOT / "kernels/native/src/api.cpp").read_text()
    asked = api.partition(f"if (level == k{level.capitalize()})")[2].partition(";")[0]

    assert set(re.findall(r'supports\("(\w+)"\)', asked)) == {flag.removeprefix("-m") for flag in flags}
