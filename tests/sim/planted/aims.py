"""What makes drawn scenarios meet a rare situation more often."""

import dataclasses
from typing import Any

from scheduler_svc.sim.faults import STEP_FAULTS, TIMED_FAULTS, Fault, FaultRates
from scheduler_svc.sim.scenario import Scenario
from tests.sim.planted.bug import Aim


def with_faults(*faults: Fault, per_step: float = 0.05, per_100_steps: float = 2.0) -> Aim:
    """Scenarios with exactly these faults."""

    def aim(scenario: Scenario) -> Scenario:
        rates = FaultRates(
            of_steps=tuple(fault for fault in faults if fault in STEP_FAULTS),
            per_step=per_step if set(faults) & set(STEP_FAULTS) else 0.0,
            timed=tuple(fault for fault in faults if fault in TIMED_FAULTS),
            per_s=per_100_steps / 100 / scenario.pace.step if set(faults) & set(TIMED_FAULTS) else 0.0,
            of_requests={},
        )
        return dataclasses.replace(scenario, faults=rates)

    return aim


def with_limits(*, num_workers: int | None = None, giants: float = 0.0, **limits: Any) -> Aim:
    """Scenarios with these limits."""

    def aim(scenario: Scenario) -> Scenario:
        return dataclasses.replace(
            scenario,
            config=dataclasses.replace(scenario.config, **limits),
            workers=scenario.workers[:num_workers],
            traffic=dataclasses.replace(scenario.traffic, giants=giants or scenario.traffic.giants, traced=1.0),
        )

    return aim


def with_long_freezes(scenario: Scenario) -> Scenario:
    """Workers stand still for seconds without being given up, and so does the scheduler, about as often."""
    patient = with_limits(step_deadline_s=5.0, worker_wait_s=10.0)(scenario)
    return with_faults(Fault.SCHEDULER_STALL, Fault.FREEZE, per_100_steps=50 * scenario.pace.step)(patient)


def with_moves(scenario: Scenario) -> Scenario:
    """Three equal workers, two plans in flight, and drains that move requests."""
    several = dataclasses.replace(with_limits(max_plans_in_flight=2)(scenario), workers=scenario.workers[:1] * 3)
    return with_faults(Fault.DRAIN, per_100_steps=100 * scenario.pace.step)(several)


def with_extras(scenario: Scenario) -> Scenario:
    """Many requests have grammars, ask for log-probabilities, or are come back to."""
    traffic = dataclasses.replace(scenario.traffic, grammars=0.5, scored=0.5, identified=0.5)
    config = dataclasses.replace(scenario.config, resume_keep_s=300.0, resume_keep_bytes=1 << 28)
    return dataclasses.replace(scenario, traffic=traffic, config=config)


def with_few_words(scenario: Scenario) -> Scenario:
    """Prompts repeat themselves, and the cache is on."""
    return dataclasses.replace(
        scenario,
        config=dataclasses.replace(scenario.config, prefix_cache="hash"),
        traffic=dataclasses.replace(scenario.traffic, alphabet=2),
    )
