"""The process's memory allocator."""

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20


def return_large_blocks() -> None:
    """Make glibc return every block of a megabyte or more to the system when it is freed.

    By default, freeing such a block raises the limit, up to 32 MiB. Later large blocks then come from the heap, which
    cannot shrink while a small block after them is in use.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have no such limit
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
