"""The process's memory allocator."""

import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20
_C = ctypes.CDLL(None)


def return_large_blocks() -> None:
    """Make glibc return every block of a megabyte or more to the system when it is freed.

    By default, freeing such a block raises glibc's threshold for mmap, up to 32 MiB. Later large blocks then come from
    the heap, which cannot shrink while a small block after them is in use.
    """
    mallopt = getattr(_C, "mallopt", None)  # Other C libraries do not have this limit.
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)


def return_free_memory() -> None:
    """Make glibc return free pages between small blocks to the system, at up to 0.2 ms per MiB, without the GIL.

    A heap shrinks only at its end. If a few small blocks survive, they may retain the whole heap. glibc does not return
    the last segment of a thread's heap, which has up to 64 MiB.
    """
    malloc_trim = getattr(_C, "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
