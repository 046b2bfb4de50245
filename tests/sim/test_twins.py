"""Comparisons of two simulations of one load."""

import pytest

from checks.sim.coverage import Coverage
from checks.sim.scenario import draw
from checks.sim.simulation import Simulation
from checks.sim.twins import PURPOSES, check_backlog, check_purpose
from records.rules.violation import ViolationError
from scheduler_svc.core.interface.config import POLICIES
from scheduler_svc.core.queueing.backlog import Backlog


@pytest.mark.parametrize("policy", PURPOSES)
def test_a_policy_serves_what_it_is_for_better_than_fcfs(policy: str) -> None:
    """Its purpose holds in a drawn load."""
    check_purpose(1, policy)


@pytest.mark.parametrize("seed", range(3))
def test_a_held_backlog_changes_nothing_for_other_tenants(seed: int) -> None:
    """Times, ends and cached tokens of all other requests are the same with and without it."""
    check_backlog(seed)


def test_every_policy_has_a_purpose() -> None:
    """Only `fcfs`, with which the others are compared, has none."""
    assert {*PURPOSES, "fcfs"} == set(POLICIES)


def test_a_broken_comparison_is_a_failure_of_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the seed, and one of the compared tenth of seeds finds the bug."""
    monkeypatch.setattr(Backlog, "num_startable", property(len))
    seeds = [seed for seed in range(200) if draw(seed).compares]
    assert 8 <= len(seeds) <= 40
    for seed in seeds:
        try:
            check_backlog(seed)
        except ViolationError:
            failure = Simulation(draw(seed), Coverage()).run(10).failure
            assert failure is not None
            assert failure.check in ("tenant.backlog", "order.purpose")
            return
    pytest.fail("no seed finds the bug")
