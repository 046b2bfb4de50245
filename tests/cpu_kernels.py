"""Which level of the CPU kernels serves, for the length of a test: a process chooses once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kernels.native.serving import native


@contextmanager
def cpu_kernels(level: str) -> Iterator[None]:
    """Has this level serve, or none of them ("off"), whichever was chosen before."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("QUIRE_CPU_KERNELS", level)
        native.cache_clear()
        try:
            yield
        finally:
            native.cache_clear()
