"""The library of CPU kernels that was built, its functions, and the levels of it that this processor runs."""

from __future__ import annotations

import logging
from ctypes import CDLL, POINTER, byref, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from kernels.native.structures import CAttention, CDecoder, CLinear, CSampling, CStep

ABI = 3
"""What `quire_abi` of a fitting library says."""
LEVELS = {"portable": 0, "avx2": 1, "avx512": 2}
_log = logging.getLogger(__name__)


class Native:
    """The library at one level."""

    def __init__(self, library: CDLL, level: str) -> None:
        self.library = library
        self.level_name = level
        self.level = LEVELS[level]

    def attention(self, attention: CAttention) -> None:
        """`quire_attention`."""
        self.library.quire_attention(self.level, byref(attention))

    def linear(
        self, linear: CLinear, x: torch.Tensor, work: torch.Tensor, out: torch.Tensor, store: int, out_stride: int
    ) -> None:
        """`quire_linear`."""
        self.library.quire_linear(
            self.level, byref(linear), x.data_ptr(), len(x), work.data_ptr(), out.data_ptr(), out_stride, store
        )

    def work_bytes(self, num_format: int, rows: int, inputs: int) -> int:
        """What `linear` needs of working memory."""
        activation = self.library.quire_activation_bytes(self.level, num_format)
        padded = -(-inputs // 16) * 16
        return int(rows * (-(-padded * activation // 64) * 64 + 64 + 4))

    def sample(self, sampling: CSampling) -> None:
        """`quire_sample`."""
        self.library.quire_sample(self.level, byref(sampling))

    def decoder(self, decoder: CDecoder, step: CStep, nanoseconds: int | None) -> None:
        """`quire_decoder`."""
        self.library.quire_decoder(self.level, byref(decoder), byref(step), nanoseconds)


def native_levels() -> tuple[Native, ...]:
    """Every level that this processor runs, tested or not, the portable one included."""
    library = load_library()
    if library is None:
        return ()
    mask = library.quire_levels()
    return tuple(Native(library, name) for name, level in LEVELS.items() if mask & 1 << level)


def set_num_threads(count: int) -> None:
    """How many threads compute, the caller included."""
    library = load_library()
    if library is not None:
        library.quire_set_num_threads(count)


@cache
def load_library() -> CDLL | None:
    """The library as it was built at install; None where there is none, or one of another version."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            library = CDLL(str(path))
        except OSError as error:
            _log.warning("CPU kernels cannot be loaded: %s", error)
            continue
        if library.quire_abi() != ABI:
            _log.warning("CPU kernels left out: %s is of another version; install Quire again", path.name)
            continue
        declare(library)
        return library
    return None


def declare(library: CDLL) -> None:
    """Tells ctypes the types of a library's functions."""
    declared = {
        "quire_levels": [],
        "quire_set_num_threads": [c_int],
        "quire_pack_in_place": [c_int, c_void_p, c_int64, c_int64],
        "quire_quantise": [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p],
        "quire_activation_bytes": [c_int, c_int],
        "quire_linear": [c_int, POINTER(CLinear), c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int],
        "quire_attention": [c_int, POINTER(CAttention)],
        "quire_argmax": [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p],
        "quire_sample": [c_int, POINTER(CSampling)],
        "quire_decoder": [c_int, POINTER(CDecoder), POINTER(CStep), c_void_p],
    }
    for name, argtypes in declared.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = None
    library.quire_levels.restype = c_int
    library.quire_activation_bytes.restype = c_int64
