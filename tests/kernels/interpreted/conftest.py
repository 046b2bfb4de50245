"""Nothing here is collected together with other tests: see `tests/interpreted.py`."""

import pytest

from tests.interpreted import left_out

collect_ignore_glob: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports triton, if these tests are named alone."""
    collect_ignore_glob[:] = left_out(config)
