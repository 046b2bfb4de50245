"""The study of the arena's targets."""

from typing import Any

import pytest

from measure.studies.arena import CELLS, judge, smallest, table

CELL = CELLS[0].name


def _result(scheduler: str, seed: int, *, tok_s: float = 100.0, goodput: float = 0.5, short_s: float = 1.0) -> Any:
    return {
        "cell": CELL,
        "of_capacity": 1.1,
        "scheduler": scheduler,
        "seed": seed,
        "out_tok_per_s": tok_s,
        "goodput": goodput,
        "ttft_s": {"mean": 1.0},
        "short_prompts": {"ttft_s": {"p99": short_s}},
    }


def test_targets_compare_with_the_best_setting_of_the_peer() -> None:
    """The setting with the most jobs in time counts, and each seed is compared with the same seed."""
    peers = [_result("vllm:fcfs", seed, goodput=0.2 + 0.2 * seed) for seed in (1, 2)]
    peers += [_result("vllm:fcfs+max_num_batched_tokens=2048", seed, goodput=0.1, tok_s=200.0) for seed in (1, 2)]
    ours = [_result("quire:default", seed, goodput=0.8, short_s=0.4, tok_s=98.0) for seed in (1, 2)]

    rows = {row.target.name: row for row in judge(ours, peers, ["quire:default"])}

    assert rows["outside targets"].ratios == [(1 - 0.8) / (1 - 0.4), pytest.approx((1 - 0.8) / (1 - 0.6))]
    assert rows["outside targets"].is_met
    assert rows["short TTFT p99"].is_met
    assert not rows["throughput"].is_met


def test_the_table_counts_missed_targets() -> None:
    """The table has a line for each target, and their number below."""
    rows = judge([_result("quire:default", 1)], [_result("vllm:fcfs", 1)], ["quire:default"])

    assert len(rows) == 3
    assert table(rows).endswith("2 of 3 targets missed")


def test_variants_of_a_scheduler_stand_for_it() -> None:
    """A scheduler with changed settings is judged by the targets of the one without."""
    name = "quire:slo+itl_target_ms=100"
    (row,) = judge([_result(name, 1, goodput=0.9)], [_result("vllm:fcfs", 1)], [name])
    assert row.target.scheduler == "quire:slo"
    assert row.is_met


@pytest.mark.parametrize("guess", [0.1, 0.45, 3.0])
def test_the_capacity_is_the_smallest_load_that_keeps_the_device_busy(guess: float) -> None:
    """It is found within one percent from any guess, and the device is busy at the result."""
    found = smallest(lambda share: share >= 0.469, guess)
    assert 0.469 <= found <= 0.469 * 1.01
