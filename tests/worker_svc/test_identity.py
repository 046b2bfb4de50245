"""The default name of a worker."""

import pytest

from shared.config import ConfigError
from worker_svc.link.identity import MAX_BYTES, worker_id


def test_a_wanted_name_is_kept() -> None:
    """What the operator says wins."""
    assert worker_id("gpu-7", "host", 12) == "gpu-7"


def test_the_default_name_is_host_and_process() -> None:
    """Two hosts, or two processes of one host, never share a name."""
    assert worker_id("", "host-a", 12) == "host-a-12"
    assert len({worker_id("", host, pid) for host in ("a", "b") for pid in (1, 2)}) == 4


@pytest.mark.parametrize("end", ["x", "ü"])
def test_a_long_host_name_fits_and_stays_different(end: str) -> None:
    """Hosts that differ only beyond what fits still have different names, in whole characters."""
    names = [worker_id("", "ä" * 40 + end * 20 + last, 4_194_304) for last in ("1", "2")]

    assert names[0] != names[1]
    assert all(len(name.encode()) <= MAX_BYTES and name.endswith("-4194304") for name in names)


def test_a_wanted_name_that_does_not_fit_is_refused() -> None:
    """It is never cut silently."""
    with pytest.raises(ConfigError, match="worker_id: 65 bytes exceed the limit of 64"):
        worker_id("x" * 65, "host", 1)
