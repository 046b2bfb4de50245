"""What makes drawn scenarios meet a rare situation more often."""

import dataclasses
from typing import Any

from checks.planted.bug import Aim
from checks.sim.faults import REQUEST_FAULTS, STEP_FAULTS, TIMED_FAULTS, Fault, FaultRates
from checks.sim.scenario import Scenario
from scheduler_svc.core.interface.config import BatchingLimits


def with_faults(*faults: Fault, per_step: float = 0.05, per_100_steps: float = 2.0, per_request: float = 0.05) -> Aim:
    """Scenarios with exactly these faults."""

    def aim(scenario: Scenario) -> Scenario:
        rates = FaultRates(
            of_steps=tuple(fault for fault in faults if fault in STEP_FAULTS),
            per_step=per_step if set(faults) & set(STEP_FAULTS) else 0.0,
            timed=tuple(fault for fault in faults if fault in TIMED_FAULTS),
            per_s=per_100_steps / 100 / scenario.pace.step if set(faults) & set(TIMED_FAULTS) else 0.0,
            of_requests={fault: per_request for fault in faults if fault in (*REQUEST_FAULTS, Fault.POISON)},
        )
        return dataclasses.replace(scenario, faults=rates)

    return aim


CONTINUOUS: dict[str, Any] = {"batching": BatchingLimits(), "tenant_limits": {}, "max_queued_requests": 4096}
"""Nothing but rows and memory holds a request up."""


def both(*aims: Aim) -> Aim:
    """All of them, one after the other."""

    def aim(scenario: Scenario) -> Scenario:
        for each in aims:
            scenario = each(scenario)
        return scenario

    return aim


def with_limits(*, num_workers: int | None = None, giants: float = 0.0, **limits: Any) -> Aim:
    """Scenarios with these limits; all requests are traced."""

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


def with_drafts(scenario: Scenario) -> Scenario:
    """Few rows that decode for long with free drafts, and not enough memory for all of them."""
    config = dataclasses.replace(
        scenario.config,
        **CONTINUOUS,
        max_num_seqs=3,
        max_num_batched_tokens=40,
        max_queued_tokens=1 << 24,
        max_tokens_in_paged_kv_cache=0,
        step_deadline_s=5.0,
    )
    size = dataclasses.replace(
        scenario.workers[0], block_size=2, num_blocks=100, max_rows=3, max_tokens_per_step=40, max_model_len=400,
        max_draft_tokens=4,
    )  # fmt: skip
    traffic = dataclasses.replace(
        scenario.traffic, longest_prompt=20, longest_output=90, context=120, most_live=6, giants=0.0, embeds=0.0,
        traced=1.0,
    )  # fmt: skip
    pace = dataclasses.replace(scenario.pace, per_token=0.0)
    return dataclasses.replace(scenario, config=config, workers=(size,), traffic=traffic, pace=pace)


def with_swaps(scenario: Scenario) -> Scenario:
    """Urgent requests preempt others, whose KV is swapped out at nearly no cost."""
    limits = with_limits(
        policy="priority", policy_preemption="on", capacity="max_utilization", preempt_threshold=0.0,
        prefix_cache="off", max_plans_in_flight=2,
    )  # fmt: skip
    scenario = limits(scenario)
    workers = tuple(dataclasses.replace(size, num_host_blocks=400) for size in scenario.workers)
    pace = dataclasses.replace(scenario.pace, copy=scenario.pace.step / 1e4, per_token=scenario.pace.step / 100)
    return dataclasses.replace(scenario, workers=workers, pace=pace)


def with_few_words(scenario: Scenario) -> Scenario:
    """Prompts repeat themselves, and the cache is on."""
    return dataclasses.replace(
        scenario,
        config=dataclasses.replace(scenario.config, prefix_cache="hash"),
        traffic=dataclasses.replace(scenario.traffic, alphabet=2),
    )


def with_traffic(**shape: Any) -> Aim:
    """Scenarios with such requests."""
    return lambda scenario: dataclasses.replace(scenario, traffic=dataclasses.replace(scenario.traffic, **shape))


def with_much_memory(scenario: Scenario) -> Scenario:
    """One worker with more blocks than its rows can need, and readers that take everything at once."""
    size = dataclasses.replace(scenario.workers[0], num_blocks=4096, max_model_len=4096)
    traffic = dataclasses.replace(scenario.traffic, credit_tokens=0, embeds=0.0, traced=1.0)
    return dataclasses.replace(scenario, workers=(size,), traffic=traffic)


def with_overload(scenario: Scenario) -> Scenario:
    """Many short requests wait at all times; most of their prompts begin alike."""
    traffic = dataclasses.replace(
        scenario.traffic,
        gap_s=scenario.pace.step,
        burst=10,
        most_live=60,
        longest_prompt=24,
        longest_output=3,
        families=1,
        alphabet=900,
        shared_salt=True,
        giants=0.0,
        traced=1.0,
        scored=0.0,
    )
    return dataclasses.replace(scenario, traffic=traffic)


def with_long_prompts(scenario: Scenario) -> Scenario:
    """Prompts of several steps arrive together with decode rows; a prompt token takes as long as a decode step."""
    config = dataclasses.replace(
        scenario.config,
        **CONTINUOUS,
        max_num_seqs=4,
        max_num_batched_tokens=300,
        long_prefill_token_threshold=0,
        max_queued_tokens=1 << 24,
        max_tokens_in_paged_kv_cache=0,
        itl_target_s=10 * scenario.pace.step,
        step_deadline_s=5.0,
    )
    size = dataclasses.replace(
        scenario.workers[0], block_size=16, num_blocks=200, max_rows=4, max_tokens_per_step=300, max_model_len=800,
        break_even_context=0,
    )  # fmt: skip
    traffic = dataclasses.replace(
        scenario.traffic, longest_prompt=500, longest_output=60, context=700, most_live=6, alphabet=900, families=0,
        giants=0.0, credit_tokens=0, deadlines=0.0, embeds=0.0, traced=1.0,
    )  # fmt: skip
    pace = dataclasses.replace(scenario.pace, per_token=scenario.pace.step)
    return dataclasses.replace(scenario, config=config, workers=(size,), traffic=traffic, pace=pace)
