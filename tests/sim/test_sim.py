"""The core keeps its promises in simulations, each of which a seed determines completely."""

import dataclasses
import random
import subprocess
import sys
import time
import zlib

import pytest

from checks.sim import watchdog
from checks.sim.aims import AIMS, draw_world
from checks.sim.campaign import run_campaign, summary
from checks.sim.coverage import Coverage, expected_kinds
from checks.sim.faults import NONE
from checks.sim.gaps import KNOWN
from checks.sim.report import line, render
from checks.sim.scenario import Scenario, draw
from checks.sim.simulation import Simulation
from quire_server.cli.main import main
from scheduler_svc.core.interface.config import CoreConfig
from tests.examples import SEED

FIXED_SEEDS = range(20)
STEPS = 1000
FRESH_S = 10.0


@pytest.mark.parametrize("seed", FIXED_SEEDS)
def test_fixed_seeds(seed: int) -> None:
    """Whatever goes wrong in this seed's simulation, every check holds, and every request ends once faults stop."""
    result = Simulation(draw_world(seed), Coverage()).run(STEPS)
    assert result.failure is None, render(result, STEPS)


def test_fresh_seeds() -> None:
    """The core keeps its promises in the day's simulations; a failure names the command that repeats it."""
    seeds = random.Random(f"worlds of {SEED}")
    until = time.monotonic() + FRESH_S
    while time.monotonic() < until:
        result = Simulation(draw_world(seeds.randrange(1 << 32)), Coverage()).run(STEPS)
        assert result.failure is None, render(result, STEPS)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_short_runs_check_the_core_after_every_event(seed: int) -> None:
    """In a short run the core's own invariants are checked after each event, and hold."""
    result = Simulation(draw_world(seed), Coverage()).run(300)
    assert result.failure is None, render(result, 300)


def test_without_faults_nothing_is_lost() -> None:
    """In a world without faults no worker is given up and no row fails."""
    scenario = dataclasses.replace(draw(4), faults=NONE)
    coverage = Coverage()
    assert Simulation(scenario, coverage).run(STEPS).failure is None
    assert not coverage.counts["effect", "WorkerUnknown"]
    assert not coverage.counts["end", "ROW_FAILED"]


def _digest(scenario: Scenario) -> tuple[int, int]:
    digest = count = 0

    def log(now: float, what: object) -> None:
        nonlocal digest, count
        count += 1
        digest = zlib.crc32(line(now, what).encode(), digest)  # type: ignore[arg-type]

    Simulation(scenario, Coverage(), log).run(500)
    return digest, count


@pytest.mark.parametrize("seed", [5, 6])
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    """Every event, effect and plan of a run, with its time, follows from the seed, in another process too."""
    first = _digest(draw(seed))
    assert first == _digest(draw(seed))
    program = f"from tests.sim.test_sim import _digest, draw; print(_digest(draw({seed})))"
    for hash_seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert other.stdout.strip() == str(first)


def test_different_seeds_differ() -> None:
    """Two seeds are two worlds."""
    assert draw(5) != draw(6)
    assert _digest(draw(5)) != _digest(draw(6))


def test_every_second_world_is_adapted() -> None:
    """Each adaptation has its turn, and every other seed is drawn as it is."""
    seeds = range(2 * len(AIMS))
    assert all(draw_world(seed) == draw(seed) for seed in seeds[::2])
    assert all(draw_world(seed) == aim(draw(seed)) for seed, (_, aim) in zip(seeds[1::2], AIMS, strict=True))
    assert len({name for name, _ in AIMS}) == len(AIMS)


def test_every_limit_is_drawn() -> None:
    """Each limit of the core takes several values over the seeds, so a new one cannot be forgotten."""
    configs = [draw_world(seed).config for seed in range(200)]
    constant = [
        field.name
        for field in dataclasses.fields(CoreConfig)
        if len({repr(getattr(config, field.name)) for config in configs}) == 1
    ]
    assert constant == []


def test_coverage_names_what_was_not_seen() -> None:
    """A campaign without simulations misses every kind; one that has seen everything misses none."""
    coverage = Coverage()
    assert coverage.missing() == expected_kinds()
    coverage.counts.update(expected_kinds())
    assert coverage.missing() == []


def test_a_campaign_uses_several_processes_and_adds_up() -> None:
    """A campaign counts the events of all its simulations and reports the outcome at the end."""
    outcome = run_campaign(first_seed=100, steps=200, seconds=2.0, jobs=2, say=print)
    assert outcome.failures == []
    assert outcome.num_simulations >= 4
    assert outcome.num_events >= 200
    assert summary(outcome).splitlines()[-1].split()[1] == f"simulations={outcome.num_simulations}"


def test_a_failure_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed run prints the check, the one command that replays it, and the request's history."""
    from scheduler_svc.core.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_request_cancelled", lambda self, event, now: None)
    results = (Simulation(draw(seed), Coverage()).run(500) for seed in range(20))
    result = next(result for result in results if result.failure is not None)
    text = render(result, 500)
    assert result.failure is not None
    assert f"violated: {result.failure.check}: " in text
    assert f"replay: quire sim --seed {result.seed} --steps 500" in text
    assert "story of stream" in text
    assert "arrived" in text


@pytest.mark.parametrize("extent", [[], ["--minutes", "0.01", "--jobs", "1"]], ids=["one", "campaign"])
def test_a_core_that_hangs_is_a_failure(
    extent: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A core that does not return from a plan ends the run with exit status 1; the seed and the stack are printed."""
    from scheduler_svc.core.scheduler import Scheduler

    def never_returns(self: Scheduler, *how: object) -> None:
        while True:
            pass

    monkeypatch.setattr(Scheduler, "plan", never_returns)
    monkeypatch.setattr(watchdog, "MOST_STEP_S", 0.2)
    assert main(["sim", "--seed", "5", "--steps", "200", *extent]) == 1
    printed = capsys.readouterr().out
    assert "failed seed=5" in printed
    assert "violated: hang: " in printed
    assert "in never_returns" in printed


def test_a_time_that_does_not_pass_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core whose next plan is always due at once, without any event, ends the simulation."""
    from scheduler_svc.core.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "next_plan_due", lambda self, now: now)
    failure = next(filter(None, (Simulation(draw(seed), Coverage()).run(200).failure for seed in range(20))))
    assert failure.check == "hang"


def test_nothing_is_excused() -> None:
    """The list of promises that the core is known not to keep is empty."""
    assert KNOWN == {}
