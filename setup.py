"""Builds the extension of `kernels/native`: plain C++17 behind a C ABI, loaded with ctypes. It is optional: where there
is no compiler, or the processor is not supported, Quire installs without it and computes with torch."""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

# In the tree of the server's wheel the packages lie in a private folder; see tools/dist.py.
PRIVATE = Path("quire_server/_packages")
FOLDER = PRIVATE if PRIVATE.is_dir() else Path()
SOURCES = FOLDER / "kernels/native/src"
FLAGS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra"]
# GCC takes the undefined lanes of its own AVX-512 header for a mistake of ours.
FLAGS += ["-Wno-missing-field-initializers", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
# Each level's kernels are compiled for its instructions, all else for any processor; which level runs is decided there.
_AVX512 = ["-mfma", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vnni"))]
LEVEL_FLAGS = {
    "level_portable.cpp": ["-O1"],  # serves tests only
    "level_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "level_avx512.cpp": _AVX512,
    "level_amx.cpp": [*_AVX512, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
}


class BuildNative(build_ext):
    """Compiles every source with its own flags, then links them."""

    def build_extension(self, ext: Extension) -> None:
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        objects = [self._compiled(source, ext.depends, with_levels=on_x86) for source in ext.sources]
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_postargs=["-pthread"], target_lang="c++"
        )

    def _compiled(self, source: str, depends: list[str], *, with_levels: bool) -> str:
        """Compiles one source; a level whose instructions the compiler does not know is left out."""
        level_flags = LEVEL_FLAGS.get(Path(source).name, []) if with_levels else []
        try:
            objects: list[str] = self.compiler.compile(
                [source],
                output_dir=self.build_temp,
                macros=[("QUIRE_X86_LEVELS", "1" if with_levels else "0")],
                extra_postargs=FLAGS + level_flags,
                depends=depends,
            )
        except CompileError:
            if not level_flags:
                raise
            return self._compiled(source, depends, with_levels=False)
        return objects[0]


setup(
    ext_modules=[
        Extension(
            ".".join((*FOLDER.parts, "kernels.native._native")),
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in [*SOURCES.glob("*.h"), *SOURCES.glob("*.inc")]),
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildNative},
)
