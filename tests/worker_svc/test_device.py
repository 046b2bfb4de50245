"""Which device a worker takes."""

import pytest

from shared.config import ConfigError
from worker_svc.device.choice import check_allocator, name_device


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "device"),
    [
        ("auto", 0, "cpu"),
        ("auto:3", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("auto:1", 2, "cuda:1"),
        ("auto:3", 2, "cuda:1"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
    ],
)
def test_a_setting_names_a_device(wanted: str, num_gpus: int, device: str) -> None:
    """`auto` uses what is available, modulo the number of GPUs; `cuda` means exactly that device."""
    assert name_device(wanted, num_gpus) == device


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "why"),
    [
        ("cuda", 0, "cuda:0 not found: this machine has no GPU"),
        ("cuda:2", 2, "cuda:2 not found: this machine has 2 GPUs"),
        ("cpu:1", 2, "invalid device 'cpu:1'"),
        ("abacus", 2, "invalid device 'abacus'"),
        ("cuda:-1", 2, "invalid device 'cuda:-1'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(wanted: str, num_gpus: int, why: str) -> None:
    """The line says what there is instead."""
    with pytest.raises(ConfigError, match=why):
        name_device(wanted, num_gpus)


def test_another_allocator_is_refused() -> None:
    """Replays would read memory that it has given to others."""
    check_allocator("native")
    with pytest.raises(ConfigError, match="PYTORCH_ALLOC_CONF: the allocator cudaMallocAsync is not supported"):
        check_allocator("cudaMallocAsync")
