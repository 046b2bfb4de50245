"""The service that end-to-end tests share, except those that configure or damage a service."""

import os
from collections.abc import Iterator

import pytest

from measure.testbed.service import SERVICE_VARIABLE, Service, serve


@pytest.fixture(scope="session")
def demo() -> Iterator[Service]:
    """`quire serve` with the bundled model and default settings; or a service with this model that runs already."""
    if given := os.environ.get(SERVICE_VARIABLE):
        yield Service(*given.split(","))
        return
    with serve("demo") as served:
        yield served
