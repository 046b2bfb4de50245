"""The service shared by end-to-end tests, except tests that configure or damage a service."""

import os
from collections.abc import Iterator

import pytest

from measure.testbed.service import SERVICE_VARIABLE, Service, serve


@pytest.fixture(scope="session")
def demo() -> Iterator[Service]:
    """`quire serve` with the bundled model and default settings, or an already running service with this model."""
    if given := os.environ.get(SERVICE_VARIABLE):
        yield Service(*given.split(","))
        return
    with serve("demo") as served:
        yield served
