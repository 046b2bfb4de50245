"""Nothing here is collected together with other tests: see `tests/interpreted.py`."""

from collections.abc import Iterator

import pytest

from tests.interpreted import left_out

collect_ignore_glob: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports triton, if these tests are named alone."""
    collect_ignore_glob[:] = left_out(config)


@pytest.fixture(scope="module", autouse=True)
def without_cpu_kernels() -> Iterator[None]:
    """What Triton computes on a GPU nothing else computes here."""
    # This module imports torch, so import it only after an interpreter has been chosen.
    from tests.cpu_kernels import cpu_kernels

    with cpu_kernels("off"):
        yield
