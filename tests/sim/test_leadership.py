"""Leases in simulated worlds: the promises hold, and planted bugs are found."""

from collections.abc import Callable

import pytest

from checks.sim import leadership
from checks.sim.leadership import BrokenPromiseError, Store, World
from scheduler_svc.standby import tenure
from scheduler_svc.standby.tenure import Tenure
from shared.schedulers import Schedulers

NUM_SEEDS = 60
"""Maximum number of simulations until a planted bug is found."""


@pytest.mark.parametrize("seed", range(12))
def test_one_scheduler_leads_and_no_token_is_lost(seed: int) -> None:
    """Whatever is stopped, killed, cut off or delayed; the leader changes often enough to show it."""
    assert World(seed).run() > 3


def _without_margin(self: Tenure, requested_at: float) -> None:
    self.held_until = requested_at + self.duration_s


def _without_end(self: Tenure, now: float) -> bool:
    return bool(self.number)


def _same_number(stored: int, highest: int, now_ms: int) -> int:
    return max(stored, highest) or now_ms


def _any_number(self: Schedulers, leader_number: int) -> bool:
    return True


def _any_lease(self: Store, lease: int, now: float) -> int:
    self.expire(now)
    holder, self.lease, self.holder = self.holder, 0, -1
    return holder


def _late_renewal(self: Store, lease: int, now: float) -> bool:
    if lease != self.lease:
        return False
    self.ends_at = now
    return True


def _hunt() -> None:
    for seed in range(NUM_SEEDS):
        World(seed).run()


@pytest.mark.parametrize(
    ("place", "name", "bug", "promise"),
    [
        (Tenure, "renewed", _without_margin, "one"),
        (Tenure, "may_send", _without_end, "one"),
        (tenure, "next_number", _same_number, "number"),
        (Schedulers, "accepts", _any_number, "fenced"),
        (Store, "revoke", _any_lease, "guard"),
        (Store, "renew", _late_renewal, "one"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, bug: Callable[..., object], promise: str
) -> None:
    """The simulation names the promise that the bug breaks."""
    monkeypatch.setattr(place, name, bug)

    with pytest.raises(BrokenPromiseError, match=rf"^{promise}: "):
        _hunt()


def test_a_failing_seed_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the seed and the promise."""
    monkeypatch.setattr(tenure, "next_number", _same_number)
    monkeypatch.setattr("sys.argv", ["leadership", "--seed=3", "--seeds=1"])

    assert leadership.main() == 1
    assert "seed=3 number: " in capsys.readouterr().out
