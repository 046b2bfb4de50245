"""Shared library with the native CPU kernels: its functions, and the levels that this processor supports."""

from __future__ import annotations

import logging
from ctypes import CDLL, POINTER, byref, c_double, c_int, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path

import torch

from kernels.native.structures import (
    FORMATS,
    CAttention,
    CConvolution,
    CDecoder,
    CDeltaRule,
    CHeadProducts,
    CKvWrite,
    CLatentAttention,
    CLinear,
    CNorm,
    CSampling,
    CSelectiveScan,
    CStep,
    CTokenConvolution,
)

ABI = 16
"""ABI version that `quire_abi()` of the library must return."""
LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 3}
_log = logging.getLogger(__name__)


class Native:
    """The library's functions, bound to one instruction-set level."""

    def __init__(self, library: CDLL, level: str) -> None:
        self.library = library
        self.level_name = level
        self.level = LEVELS[level]

    def attention(self, attention: CAttention) -> None:
        """Call `quire_attention`."""
        self.library.quire_attention(self.level, byref(attention))

    def latent_attention(self, attention: CLatentAttention) -> None:
        """Call `quire_latent_attention`."""
        self.library.quire_latent_attention(self.level, byref(attention))

    def head_products(self, products: CHeadProducts) -> None:
        """Call `quire_head_products`."""
        self.library.quire_head_products(self.level, byref(products))

    def linear(self, linear: CLinear, x: torch.Tensor, out: torch.Tensor, store: int, out_stride: int) -> None:
        """Call `quire_linear` with a contiguous `x`."""
        self.library.quire_linear(
            self.level, byref(linear), FORMATS[x.dtype], x.data_ptr(), len(x), out.data_ptr(), out_stride, store
        )

    def sample(self, sampling: CSampling) -> None:
        """Call `quire_sample`."""
        self.library.quire_sample(self.level, byref(sampling))

    def delta_rule(self, rule: CDeltaRule) -> None:
        """Call `quire_delta_rule`."""
        self.library.quire_delta_rule(self.level, byref(rule))

    def selective_scan(self, scan: CSelectiveScan) -> None:
        """Call `quire_selective_scan`."""
        self.library.quire_selective_scan(self.level, byref(scan))

    def convolve_tokens(self, convolution: CTokenConvolution) -> None:
        """Call `quire_convolve_tokens`."""
        self.library.quire_convolve_tokens(self.level, byref(convolution))

    def convolve(self, convolution: CConvolution) -> None:
        """Call `quire_convolve`."""
        self.library.quire_convolve(self.level, byref(convolution))

    def rms_norm(self, norm: CNorm) -> None:
        """Call `quire_rms_norm`."""
        self.library.quire_rms_norm(self.level, byref(norm))

    def write_kv(self, write: CKvWrite) -> None:
        """Call `quire_write_kv`."""
        self.library.quire_write_kv(byref(write))

    def decoder(self, decoder: CDecoder, step: CStep, nanoseconds: int | None) -> bool:
        """Call `quire_decoder`; return False if the sum over the ranks failed, in which case there is no result."""
        return bool(self.library.quire_decoder(self.level, byref(decoder), byref(step), nanoseconds) == 0)


def native_levels() -> tuple[Native, ...]:
    """Return all levels that this processor supports, including the portable one, without a self-test."""
    library = load_library()
    if library is None:
        return ()
    mask = library.quire_levels()
    return tuple(Native(library, name) for name, level in LEVELS.items() if mask & 1 << level)


def set_num_threads(count: int) -> None:
    """Set the number of threads that compute, including the calling thread."""
    library = load_library()
    if library is not None:
        library.quire_set_num_threads(count)


@cache
def load_library() -> CDLL | None:
    """Load the library built during installation; return None if it is missing or has another ABI version."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            library = CDLL(str(path))
        except OSError as error:
            _log.warning("native CPU kernels: cannot load the library: %s; using torch", error)
            continue
        if library.quire_abi() != ABI:
            _log.warning("native CPU kernels: %s has a different version; using torch; install Quire again", path.name)
            continue
        declare(library)
        return library
    return None


def declare(library: CDLL) -> None:
    """Set the ctypes signatures of the library's functions."""
    declared = {
        "quire_levels": [],
        "quire_set_num_threads": [c_int],
        "quire_pack_in_place": [c_int, c_void_p, c_int64, c_int64],
        "quire_quantise": [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p],
        "quire_quantise_int4": [c_int, c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p],
        "quire_linear": [c_int, POINTER(CLinear), c_int, c_void_p, c_int64, c_void_p, c_int64, c_int],
        "quire_read": [c_void_p, c_int64],
        "quire_attention": [c_int, POINTER(CAttention)],
        "quire_latent_attention": [c_int, POINTER(CLatentAttention)],
        "quire_head_products": [c_int, POINTER(CHeadProducts)],
        "quire_argmax": [c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p],
        "quire_sample": [c_int, POINTER(CSampling)],
        "quire_delta_rule": [c_int, POINTER(CDeltaRule)],
        "quire_selective_scan": [c_int, POINTER(CSelectiveScan)],
        "quire_convolve_tokens": [c_int, POINTER(CTokenConvolution)],
        "quire_convolve": [c_int, POINTER(CConvolution)],
        "quire_rms_norm": [c_int, POINTER(CNorm)],
        "quire_write_kv": [POINTER(CKvWrite)],
        "quire_shared_sum_bytes": [c_int64],
        "quire_shared_sum": [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_double],
        "quire_decoder": [c_int, POINTER(CDecoder), POINTER(CStep), c_void_p],
    }
    for name, argtypes in declared.items():
        function = getattr(library, name)
        function.argtypes = argtypes
        function.restype = None
    library.quire_levels.restype = c_int
    library.quire_decoder.restype = c_int
    library.quire_shared_sum.restype = c_int
    library.quire_shared_sum_bytes.restype = c_int64
    library.quire_read.restype = c_uint64
