"""Defaults of a step's limits by device and model, and the share of a GPU's memory that KV gets: by table."""

import pytest

from shared.config import ConfigError
from worker_svc.execution.step_sizes import Gpu, default_rows, default_tokens, largest_captured
from worker_svc.memory.kv_pool import share_for_kv

H100 = Gpu(total_memory=79 << 30, multiprocessors=132, capability=90)
A100 = Gpu(total_memory=39 << 30, multiprocessors=108, capability=80)
L4 = Gpu(total_memory=22 << 30, multiprocessors=58, capability=89)
RTX_5090 = Gpu(total_memory=31 << 30, multiprocessors=170, capability=120)
T4 = Gpu(total_memory=15 << 30, multiprocessors=40, capability=75)
SMALL, LARGE, HUGE = (28, 15_700_000), (32, 218_000_000), (64, 480_000_000)
"""Layers and weights per layer of Qwen3 0.6B, Llama 8B and Qwen3 32B."""


@pytest.mark.parametrize(
    ("gpu", "model", "rows", "tokens", "captured"),
    [
        (None, SMALL, 64, 512, 256),
        (H100, SMALL, 256, 8192, 2048),
        (H100, LARGE, 256, 8192, 576),
        (H100, HUGE, 256, 4096, 256),
        (H100, (32, 0), 256, 2048, 256),
        (A100, LARGE, 256, 4096, 256),
        (L4, LARGE, 256, 2048, 256),
        (RTX_5090, LARGE, 256, 2048, 256),
        (T4, SMALL, 128, 2048, 576),
    ],
    ids=["CPU", "0.6B", "8B", "32B", "unknown model", "A100", "L4", "RTX 5090", "T4"],
)
def test_limits_follow_the_device_and_the_model(
    gpu: Gpu | None, model: tuple[int, int], rows: int, tokens: int, captured: int
) -> None:
    """A fast GPU computes 8,192 tokens in a step if that takes half a second; small models are captured further."""
    layers, weights = model

    assert default_rows(gpu) == rows
    assert default_tokens(gpu, layers * weights, rows) == tokens
    assert largest_captured(gpu, layers * weights, layers) == captured


def test_half_of_the_tokens_are_left_to_prompts() -> None:
    """A larger limit of rows raises the default of tokens."""
    assert default_tokens(H100, 7_000_000_000, 5000) == 10_000
    assert default_tokens(None, 0, 1000) == 2000


def memory(available: int, utilization: float) -> int:
    """Return the share for KV on a GPU of 80 GB with a model that needs 20 GB."""
    gb = 10**9
    return share_for_kv(
        total=80 * gb,
        utilization=utilization,
        available=available * gb,
        available_after=(available - 1) * gb,
        peak=18 * gb,
        graphs=1 * gb,
        device="cuda:0",
    )


def test_a_share_does_not_depend_on_what_others_hold() -> None:
    """Two workers with 0.45 each get equal KV caches; weights, activations, graphs and libraries are subtracted."""
    assert memory(79, 0.45) == memory(43, 0.45) == (36 - 20) * 10**9


def test_a_share_that_is_not_free_is_refused() -> None:
    """The message says how much is free and which share fits: two workers with 0.9 each do not fit on one GPU."""
    with pytest.raises(ConfigError, match=r"0\.9 of cuda:0 are 72,000,000,000 bytes, but .* 8,000,000,000; .* 0\.09"):
        memory(8, 0.9)
