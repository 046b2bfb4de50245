"""Leases in simulated worlds: the promises hold, and planted bugs are found."""

from collections.abc import Callable, Iterable

import pytest

from checks.sim.leadership import command, fleet, world
from checks.sim.leadership.events import BrokenPromiseError
from checks.sim.leadership.fleet import Fleet
from checks.sim.leadership.models import Journal, Lead, Process, Session, Store, Tokens
from checks.sim.leadership.world import World
from scheduler_svc.standby import tenure
from scheduler_svc.standby.cursor import Replica
from scheduler_svc.standby.leader_number import Numbers
from scheduler_svc.standby.tenure import Tenure
from shared.schedulers import Schedulers

FIRST_SEED = 1000
NUM_SEEDS = 160
"""Maximum number of simulations until a planted bug is found."""


@pytest.mark.parametrize("seed", range(12))
def test_one_scheduler_leads_and_no_token_is_lost(seed: int) -> None:
    """No promise is broken if processes are stopped, killed, cut off, slow or delayed."""
    assert World(seed).run()


def test_the_simulations_contain_what_they_are_for() -> None:
    """Leaders change, standbys start over, front ends fill a lost tail, and KV of other workers is computed again."""
    worlds = [World(seed) for seed in range(20)]
    assert sum(each.run() for each in worlds) > 3 * len(worlds)
    assert sum(each.replication.starts_over for each in worlds) > 5 * len(worlds)
    assert sum(each.filled for each in worlds)
    assert sum(each.fleet.computed_again for each in worlds)


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


def _fastest(replicas: Iterable[Replica]) -> float:
    return max((each.replicated for each in replicas if each.replicated >= 0), default=float("inf"))


def _without_standby(replicas: Iterable[Replica]) -> float:
    return float("inf")


def _never_late(self: Replica, now: float) -> bool:
    return False


def _always_stands(numbers: Numbers, copied: int, *, silence_s: float, grace_s: float) -> bool:
    return True


def _filled_in_memory_only(self: Journal, tokens: Tokens) -> None:
    self._tokens = tokens


_submit, _plan = World._submit, Fleet.plan


def _own_log(self: World, process: Process, session: Session, tokens: Tokens) -> None:
    log = tokens if process.lead is None else process.lead.log
    _submit(self, process, session, log[: len(tokens)])


def _any_worker(self: Fleet, process: Process, lead: Lead) -> Callable[[], None] | None:
    if lead.plan is None and lead.workers:
        lead.assigned = self.workers[lead.attempt % len(self.workers)].index
    return _plan(self, process, lead)


def _whole_row(lead: Lead, index: int) -> int:
    return min(len(lead.workers[index][1]), len(lead.log))


def _hunt() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_SEEDS):
        World(seed).run()


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    ("place", "name", "bug", "promise"),
    [
        (Tenure, "renewed", _without_margin, "one"),
        (Tenure, "may_send", _without_end, "one"),
        (tenure, "next_number", _same_number, "number"),
        (Schedulers, "accepts", _any_number, "fenced|joined"),
        (Store, "revoke", _any_lease, "guard"),
        (Store, "renew", _late_renewal, "one"),
        (Replica, "give_up", _never_late, "progress"),
        (world, "replicated", _fastest, "tail"),
        (world, "replicated", _without_standby, "tail"),
        (tenure, "may_stand", _always_stands, "whole"),
        (Journal, "rewrite", _filled_in_memory_only, "tail|copy"),
        (World, "_submit", _own_log, "stream"),
        (Fleet, "plan", _any_worker, "twice|stream"),
        (fleet, "_kept", _whole_row, "stream"),
    ],
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, place: object, name: str, bug: Callable[..., object], promise: str
) -> None:
    """The simulation names the promise that the bug breaks."""
    monkeypatch.setattr(place, name, bug)

    with pytest.raises(BrokenPromiseError, match=rf"^({promise}): "):
        _hunt()


def test_a_failing_seed_fails_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the seed and the promise."""
    monkeypatch.setattr(tenure, "next_number", _same_number)
    monkeypatch.setattr("sys.argv", ["leadership", "--seed=3", "--seeds=1"])

    assert command.main() == 1
    assert "seed=3 number: " in capsys.readouterr().out
