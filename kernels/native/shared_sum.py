"""Sums over several processes on one machine, through a file that all of them map into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import torch

from kernels.native.library import load_library


class SharedSum:
    """One rank's view of the shared memory (`kernels/native/src/shared_sum.h`)."""

    def __init__(self, file: Path, rank: int, ranks: int) -> None:
        """Map the file that `create` made; needs the native library.

        Raises:
            OSError: the file cannot be mapped, or the native library is missing.
        """
        library = load_library()
        if library is None:
            raise OSError("native CPU kernels: the library is not available")
        self._library = library
        self._rank, self._ranks = rank, ranks
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, library.quire_shared_sum_bytes(ranks))
        finally:
            os.close(descriptor)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    @staticmethod
    def create(file: Path, ranks: int) -> None:
        """Create the zero-filled file that a group of ranks shares. If the native library is missing, do nothing."""
        library = load_library()
        if library is not None:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.posix_fallocate(descriptor, 0, library.quire_shared_sum_bytes(ranks))
            os.close(descriptor)

    def add_up(self, vector: torch.Tensor, timeout_s: float) -> None:
        """Sum a contiguous float32 CPU tensor over all ranks, in place.

        Raises:
            TimeoutError: another rank did not take part within ``timeout_s``.
        """
        done = self._library.quire_shared_sum(
            self._address, self._rank, self._ranks, vector.data_ptr(), vector.numel(), timeout_s
        )
        if not done:
            raise TimeoutError(f"another rank did not take part in a sum within {timeout_s:g} s")
