"""The headroom that admission learns is about as good as the best constant one."""

import pytest

from measure.studies.headroom import WORKLOADS, constant, measure


@pytest.mark.parametrize("name", ["memory for ten", "many small requests"])
def test_the_learned_headroom_loses_at_most_five_percent(name: str) -> None:
    """Throughput under memory pressure is at least 95 % of that with the best constant headroom."""
    workload = next(each for each in WORKLOADS if each.name == name)
    best = 0.0
    for share in (0.0, 0.03, 0.1, 0.3):
        with constant(int(share * workload.num_blocks)):
            best = max(best, measure(workload, num_requests=200).tokens_per_s)

    assert measure(workload, num_requests=200).tokens_per_s >= 0.95 * best


def test_a_constant_headroom_matters() -> None:
    """The comparison can fail: half of the memory as headroom costs more than five percent."""
    workload = next(each for each in WORKLOADS if each.name == "memory for ten")
    with constant(workload.num_blocks // 2):
        too_much = measure(workload, num_requests=200)

    assert too_much.tokens_per_s < 0.95 * measure(workload, num_requests=200).tokens_per_s
