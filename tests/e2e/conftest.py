"""The service that end-to-end tests share if they neither configure nor damage it."""

from collections.abc import Iterator

import pytest

from tests.e2e.harness import Served, serve


@pytest.fixture(scope="package")
def demo() -> Iterator[Served]:
    """`quire serve` with the embedded model and default settings."""
    with serve("demo") as served:
        yield served
