"""Adapts scenarios so that rare situations become more frequent.

`draw_world` generates a seed's scenario and applies one adaptation to every second seed, in turn. Each area of the core
therefore runs in the situations that expose its errors. The other seeds combine all features at random.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from checks.sim.faults import REQUEST_FAULTS, STEP_FAULTS, TIMED_FAULTS, Fault, FaultRates
from checks.sim.scenario import TENANTS, DiskShape, Scenario, WindowShape, draw
from scheduler_svc.core.interface.config import BatchingLimits, RequestClass, TenantLimits

Aim = Callable[[Scenario], Scenario]
"""Function that adapts a scenario to a rare situation."""


def with_faults(*faults: Fault, per_step: float = 0.05, per_100_steps: float = 2.0, per_request: float = 0.05) -> Aim:
    """Return the scenario with exactly these faults."""

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
"""Settings under which a request waits only for rows and memory."""


def both(*aims: Aim) -> Aim:
    """Return a function that applies several adaptations one after the other."""

    def aim(scenario: Scenario) -> Scenario:
        for each in aims:
            scenario = each(scenario)
        return scenario

    return aim


def with_limits(*, num_workers: int | None = None, giants: float = 0.0, **limits: Any) -> Aim:
    """Return an adaptation with these limits, in which all requests are traced."""

    def aim(scenario: Scenario) -> Scenario:
        return dataclasses.replace(
            scenario,
            config=dataclasses.replace(scenario.config, **limits),
            workers=scenario.workers[:num_workers],
            traffic=dataclasses.replace(scenario.traffic, giants=giants or scenario.traffic.giants, traced=1.0),
        )

    return aim


def with_long_freezes(scenario: Scenario) -> Scenario:
    """Stall workers for seconds without losing them, and stall the scheduler about as often."""
    patient = with_limits(step_deadline_s=5.0, worker_wait_s=10.0)(scenario)
    return with_faults(Fault.SCHEDULER_STALL, Fault.FREEZE, per_100_steps=50 * scenario.pace.step)(patient)


def with_moves(scenario: Scenario) -> Scenario:
    """Use three equal workers, two plans in flight, and drains that move requests."""
    several = dataclasses.replace(with_limits(max_plans_in_flight=2)(scenario), workers=scenario.workers[:1] * 3)
    return with_faults(Fault.DRAIN, per_100_steps=2.0)(several)


def with_extras(scenario: Scenario) -> Scenario:
    """Give many requests grammars, log-probabilities or clients that resume."""
    traffic = dataclasses.replace(scenario.traffic, grammars=0.5, scored=0.5, identified=0.5)
    config = dataclasses.replace(scenario.config, resume_keep_s=300.0, resume_keep_bytes=1 << 28)
    return dataclasses.replace(scenario, traffic=traffic, config=config)


def with_drafts(scenario: Scenario) -> Scenario:
    """Use few rows that decode for a long time with cheap drafts, and too little memory for all of them."""
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
    """Let urgent requests preempt others, whose KV is swapped out at almost no cost."""
    limits = with_limits(
        policy="priority", policy_preemption="on", capacity="max_utilization", preempt_threshold=0.0,
        prefix_cache="off", max_plans_in_flight=2,
    )  # fmt: skip
    scenario = limits(scenario)
    workers = tuple(dataclasses.replace(size, num_host_blocks=400) for size in scenario.workers)
    pace = dataclasses.replace(scenario.pace, copy=scenario.pace.step / 1e4, per_token=scenario.pace.step / 100)
    return dataclasses.replace(scenario, workers=workers, pace=pace)


def with_host_cache(scenario: Scenario) -> Scenario:
    """Let long prompts with shared prefixes share little memory, and much host memory with almost free copies."""
    limits = with_limits(
        **CONTINUOUS, policy="fcfs", capacity="max_utilization", prefix_cache="hash", max_plans_in_flight=2,
        max_tokens_in_paged_kv_cache=0, max_num_seqs=4, max_num_batched_tokens=40,
    )  # fmt: skip
    scenario = limits(scenario)
    workers = tuple(
        dataclasses.replace(
            size,
            block_size=2,
            num_blocks=60,
            num_host_blocks=200,
            max_rows=4,
            max_tokens_per_step=40,
            max_model_len=100,
        )
        for size in scenario.workers
    )
    traffic = dataclasses.replace(
        scenario.traffic, longest_prompt=60, longest_output=20, context=90, most_live=8, giants=0.0, alphabet=2,
        families=6, embeds=0.0,
    )  # fmt: skip
    pace = dataclasses.replace(scenario.pace, copy=scenario.pace.step / 1e4, per_token=scenario.pace.step / 100)
    return dataclasses.replace(scenario, workers=workers, traffic=traffic, pace=pace, state_bytes=0)


def with_few_host_blocks(scenario: Scenario) -> Scenario:
    """Let blocks leave the host often."""
    workers = tuple(dataclasses.replace(size, num_host_blocks=16) for size in scenario.workers)
    return dataclasses.replace(scenario, workers=workers)


def with_disk(scenario: Scenario) -> Scenario:
    """Let blocks leave the host often, for a large and fast disk."""
    scenario = with_few_host_blocks(with_host_cache(scenario))
    workers = tuple(dataclasses.replace(size, num_disk_blocks=400) for size in scenario.workers)
    return dataclasses.replace(scenario, workers=workers, disk=DiskShape(block_s=scenario.pace.step / 1e3))


def with_few_slots(scenario: Scenario) -> Scenario:
    """Let blocks leave the disk often."""
    workers = tuple(dataclasses.replace(size, num_disk_blocks=24) for size in scenario.workers)
    return dataclasses.replace(scenario, workers=workers)


def with_bad_disk(scenario: Scenario) -> Scenario:
    """Let the disk be slow, fail often, and hang sometimes."""
    disk = DiskShape(block_s=scenario.pace.step / 10, failures=0.1, hangs=0.02)
    return dataclasses.replace(scenario, disk=disk)


def with_slow_copies(scenario: Scenario) -> Scenario:
    """Let the copy of a block take as long as the computation of half of its tokens, and steps be short."""
    step = scenario.pace.step
    pace = dataclasses.replace(scenario.pace, copy=step / 20, per_token=step / 20)
    config = dataclasses.replace(scenario.config, max_num_batched_tokens=8)
    return dataclasses.replace(scenario, pace=pace, config=config)


def with_state(scenario: Scenario) -> Scenario:
    """Workers whose model has recurrent state nevertheless offer drafts and host blocks."""
    sizes = [dataclasses.replace(size, max_draft_tokens=4, num_host_blocks=400) for size in scenario.workers]
    return dataclasses.replace(scenario, workers=tuple(sizes), state_bytes=64)


def with_host_states(number: int) -> Aim:
    """Return an adaptation to workers whose host memory holds so many recurrent states."""
    return lambda scenario: dataclasses.replace(with_state(scenario), num_host_states=number)


def with_checkpoints(number: int) -> Aim:
    """Return an adaptation: repetitive prompts, and workers that save this many recurrent states."""
    return lambda scenario: dataclasses.replace(with_state(with_few_words(scenario)), num_checkpoints=number)


def with_states_in_host_cache(num_checkpoints: int, num_host_states: int) -> Aim:
    """Return an adaptation: cached prefixes with recurrent state move to host memory and come back."""
    return lambda scenario: dataclasses.replace(
        with_host_cache(scenario),
        state_bytes=64,
        num_checkpoints=num_checkpoints,
        num_host_states=num_host_states,
    )


def with_windows(window: int, chunk: int = 6, *, num_groups: int = 3) -> Aim:
    """Return an adaptation with so many KV groups, all but one with a window, and host blocks."""

    def adapt(scenario: Scenario) -> Scenario:
        sizes = [
            dataclasses.replace(
                size, num_blocks=num_groups * size.num_blocks + 8 * num_groups * (window + chunk), num_host_blocks=100
            )
            for size in scenario.workers
        ]
        config = dataclasses.replace(scenario.config, max_tokens_in_paged_kv_cache=0)
        windows = WindowShape(num_groups, window, chunk)
        return dataclasses.replace(scenario, config=config, workers=tuple(sizes), windows=windows, state_bytes=0)

    return adapt


def with_windows_on_host(window: int, chunk: int = 6, *, num_groups: int = 3, num_blocks: int = 110) -> Aim:
    """Return an adaptation with windows, in which cached prefixes move to the host, and little device memory.

    Each worker has `num_blocks` blocks of 2 tokens, and host memory for several prefixes.
    """

    def adapt(scenario: Scenario) -> Scenario:
        scenario = with_windows(window, chunk, num_groups=num_groups)(with_host_cache(scenario))
        sizes = [dataclasses.replace(size, num_blocks=num_blocks, num_host_blocks=500) for size in scenario.workers]
        return dataclasses.replace(scenario, workers=tuple(sizes))

    return adapt


def with_sessions(scenario: Scenario) -> Scenario:
    """Most requests continue an earlier one, and memory holds the working sets of a few sessions only."""
    step = scenario.pace.step
    limits = with_limits(
        num_workers=1, policy="balanced", classes={}, prefix_cache="hash", capacity="max_utilization",
        max_tokens_in_paged_kv_cache=0, max_queued_tokens=1 << 24, max_num_seqs=8, max_num_batched_tokens=200,
        long_prefill_token_threshold=0, session_wait_s=60 * step, **CONTINUOUS,
    )  # fmt: skip
    scenario = both(limits, with_faults())(scenario)
    size = dataclasses.replace(
        scenario.workers[0], block_size=2, num_blocks=100, max_rows=8, max_tokens_per_step=200, max_model_len=4096,
        max_draft_tokens=0,
    )  # fmt: skip
    traffic = dataclasses.replace(
        scenario.traffic, conversations=0.9, longest_prompt=60, longest_output=40, context=160, giants=0.0,
        deadlines=0.0, credit_tokens=0, embeds=0.0, scored=0.0, grammars=0.0, identified=0.0, models=0.0,
        alphabet=900, families=0, shared_salt=True, most_live=12, gap_s=4 * step, burst=2,
    )  # fmt: skip
    pace = dataclasses.replace(scenario.pace, tick=4 * step, per_token=step / 10)
    return dataclasses.replace(scenario, workers=(size,), traffic=traffic, pace=pace, state_bytes=0)


def with_few_words(scenario: Scenario) -> Scenario:
    """Use repetitive prompts and a prefix cache."""
    return dataclasses.replace(
        scenario,
        config=dataclasses.replace(scenario.config, prefix_cache="hash"),
        traffic=dataclasses.replace(scenario.traffic, alphabet=2),
    )


def with_traffic(**shape: Any) -> Aim:
    """Return an adaptation of the traffic."""
    return lambda scenario: dataclasses.replace(scenario, traffic=dataclasses.replace(scenario.traffic, **shape))


def with_much_memory(scenario: Scenario) -> Scenario:
    """Use one worker with more blocks than its rows can need, and clients that read immediately."""
    size = dataclasses.replace(scenario.workers[0], num_blocks=4096, max_model_len=4096)
    traffic = dataclasses.replace(scenario.traffic, credit_tokens=0, embeds=0.0, traced=1.0)
    return dataclasses.replace(scenario, workers=(size,), traffic=traffic)


def with_overload(scenario: Scenario) -> Scenario:
    """Keep many short requests waiting, most of which share a prefix."""
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
    """Send prompts that take several steps together with decode rows; a prompt token takes as long as a decode step."""
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


ALL_TRACED = with_traffic(traced=1.0, embeds=0.0)
"""All requests are traced, so that the simulator sees every preemption."""


def with_several(scenario: Scenario) -> Scenario:
    """Use three workers, each with half of the previous worker's context."""
    first = scenario.workers[0]
    context = min(first.max_model_len, first.num_blocks * first.block_size)
    sizes = [dataclasses.replace(first, max_model_len=max(2, context >> number)) for number in range(3)]
    return dataclasses.replace(scenario, workers=tuple(sizes))


def with_quota(**limits: Any) -> Aim:
    """Return an adaptation with one worker with much memory, and these limits for every tenant."""
    each = {"": TenantLimits(**limits)}
    return both(with_much_memory, with_limits(**CONTINUOUS | {"tenant_limits": each}))


def with_retention(scenario: Scenario) -> Scenario:
    """Several tenants with separate cache scopes retain some of their sequences, in memory that holds only a few."""
    scenario = with_sessions(scenario)
    traffic = dataclasses.replace(scenario.traffic, retained=0.15, named_sessions=0.5, shared_salt=False)
    config = dataclasses.replace(scenario.config, retention_share=0.7, session_wait_s=0.0)
    size = dataclasses.replace(scenario.workers[0], num_blocks=300)
    return dataclasses.replace(scenario, traffic=traffic, config=config, workers=(size,))


def with_little_memory(scenario: Scenario) -> Scenario:
    """Use one worker with too few blocks for its rows, and urgent requests that preempt others."""
    config = dataclasses.replace(
        scenario.config, **CONTINUOUS, policy="priority", classes={}, policy_preemption="on", preempt_threshold=0.0,
        capacity="max_utilization", victim_rule="fewest", prefix_cache="hash", max_num_seqs=6,
        max_num_batched_tokens=64, max_queued_tokens=1 << 24, max_tokens_in_paged_kv_cache=0, max_plans_in_flight=2,
    )  # fmt: skip
    size = dataclasses.replace(
        scenario.workers[0], block_size=2, num_blocks=40, max_rows=6, max_tokens_per_step=64, max_model_len=4096,
    )  # fmt: skip
    traffic = dataclasses.replace(
        scenario.traffic, longest_prompt=24, longest_output=24, context=60, most_live=12, families=2, alphabet=900,
        shared_salt=True, giants=0.0, embeds=0.0, scored=0.0, traced=1.0,
    )  # fmt: skip
    return dataclasses.replace(scenario, config=config, workers=(size,), traffic=traffic)


def with_few_rows(scenario: Scenario) -> Scenario:
    """Use two rows with enough memory, and slow clients."""
    config = dataclasses.replace(
        scenario.config, **CONTINUOUS, max_num_seqs=2, max_num_batched_tokens=32, capacity="max_utilization"
    )
    traffic = dataclasses.replace(scenario.traffic, credit_tokens=2, traced=1.0)
    return with_much_rows(dataclasses.replace(scenario, config=config, traffic=traffic))


def with_much_rows(scenario: Scenario) -> Scenario:
    """Use one worker with enough memory for every request."""
    size = scenario.workers[0]
    blocks = size.max_rows * -(-2 * scenario.traffic.context // size.block_size)
    size = dataclasses.replace(size, num_blocks=max(size.num_blocks, blocks), max_model_len=4096)
    config = dataclasses.replace(scenario.config, max_tokens_in_paged_kv_cache=0, max_queued_tokens=1 << 24)
    traffic = dataclasses.replace(scenario.traffic, giants=0.0)
    return dataclasses.replace(scenario, config=config, workers=(size,), traffic=traffic)


def with_slow_steps(scenario: Scenario) -> Scenario:
    """Make steps about as long as the refill time of token buckets."""
    pace = dataclasses.replace(
        scenario.pace, step=_SLOW_STEP_S, latency=0.001, per_token=0.0, copy=0.001, turn=0.0, tick=0.2
    )
    gap_s = scenario.traffic.gap_s * _SLOW_STEP_S / scenario.pace.step
    return dataclasses.replace(scenario, pace=pace, traffic=dataclasses.replace(scenario.traffic, gap_s=gap_s))


_SLOW_STEP_S = 0.05


def with_rates(scenario: Scenario) -> Scenario:
    """Let tenants exceed their token rates while workers and cores restart and clients reconnect.

    Buckets are small, so a few tokens that are charged wrongly hold a tenant up.
    """
    rates = both(
        with_quota(tokens_per_s=_SLOW_RATE),
        with_slow_steps,
        with_traffic(traced=1.0, longest_prompt=12, longest_output=12, most_live=30, identified=0.3, deadlines=0.0),
        with_limits(
            resume_keep_s=300.0,
            resume_keep_bytes=1 << 28,
            step_deadline_s=5.0,
            worker_wait_s=10.0,
            stall_timeout_s=5.0,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_queued_tokens=1 << 24,
        ),
    )
    faults = with_faults(
        Fault.GOODBYE,
        Fault.RESULT_AFTER_RECONNECT,
        Fault.CORE_RESTART,
        Fault.CANCEL,
        per_step=0.05,
        per_100_steps=0.5,
        per_request=0.2,
    )
    return both(rates, faults)(scenario)


def with_drafts_and_a_rate(scenario: Scenario) -> Scenario:
    """Use rows that decode for a long time with cheap drafts, and a tenant with a small bucket."""
    limits = {"a": TenantLimits(tokens_per_s=0.5)}
    return both(with_drafts, with_slow_steps, with_limits(tenant_limits=limits))(scenario)


def with_groups(scenario: Scenario) -> Scenario:
    """Compute prompts with the same beginning in small chunks, some of them completely, while clients leave."""
    calm = both(with_much_memory, with_faults(Fault.CANCEL, per_request=0.3))(scenario)
    config = dataclasses.replace(
        calm.config,
        **CONTINUOUS,
        policy="fcfs",
        classes={},
        prefix_cache="hash",
        long_prefill_token_threshold=2,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_queued_tokens=1 << 24,
        max_tokens_in_paged_kv_cache=0,
    )
    size = dataclasses.replace(calm.workers[0], block_size=2, max_rows=4, max_tokens_per_step=16, break_even_context=0)
    traffic = dataclasses.replace(
        with_overload(calm).traffic,
        gap_s=3 * calm.pace.step,
        burst=3,
        most_live=14,
        embeds=0.3,
        scored=0.2,
        deadlines=0.0,
    )
    return dataclasses.replace(calm, config=config, workers=(size,), traffic=traffic)


def with_deadlines(scenario: Scenario) -> Scenario:
    """Use few rows, many deadlines, and tenants with a long backlog that may run one request at a time.

    With several workers, there are also faults that interrupt no worker.
    """
    num_workers = len(scenario.workers)
    harmless = (Fault.LATE_RESULT, Fault.DUPLICATE_RESULT, Fault.FAILED_ROW, Fault.CANCEL)
    faults = with_faults(*harmless, per_step=0.03) if num_workers > 1 else with_faults()
    limits = {tenant: TenantLimits(max_running=1) for tenant in TENANTS[1:]}
    calm = both(with_much_memory, faults, with_limits(**CONTINUOUS | {"tenant_limits": limits}))(scenario)
    config = dataclasses.replace(calm.config, policy="fcfs", classes={}, max_num_seqs=3, max_num_batched_tokens=64)
    size = dataclasses.replace(calm.workers[0], max_rows=3, max_tokens_per_step=64)
    traffic = dataclasses.replace(
        calm.traffic,
        deadlines=0.5,
        steps_per_token=600.0,
        longest_prompt=8,
        longest_output=8,
        credit_tokens=0,
        grammars=0.0,
        identified=0.0,
        embeds=0.0,
        traced=1.0,
        most_live=200,
        gap_s=calm.pace.step * 2 / num_workers,
        burst=16,
    )
    scenario = with_much_rows(dataclasses.replace(calm, config=config, workers=(size,), traffic=traffic))
    return dataclasses.replace(scenario, workers=scenario.workers * num_workers)


def with_short_logs(scenario: Scenario) -> Scenario:
    """Drop retained logs soon, because they are old or memory is short."""
    scenario = both(with_extras, with_traffic(identified=0.9, scored=0.5, embeds=0.0))(scenario)
    scenario = with_limits(resume_keep_s=20 * scenario.pace.step, resume_keep_bytes=20_000)(scenario)
    return with_faults(Fault.CORE_RESTART, per_100_steps=0.5)(scenario)


def with_comparison(scenario: Scenario) -> Scenario:
    """Compare pairs of simulations, see `twins`."""
    return dataclasses.replace(scenario, compares=True)


_SLOW_RATE = 1.0
_CRASHES = both(ALL_TRACED, with_limits(num_workers=1, **CONTINUOUS), with_faults(Fault.CRASH, per_step=0.2))
_FAIR = both(with_much_memory, with_limits(policy="fair", classes={}, tenant_weights={"b": 2.0}, **CONTINUOUS))
_CLASSES = {name: RequestClass(policy="priority", weight=1.0) for name in ("a", "b")}

AIMS: tuple[tuple[str, Aim], ...] = (
    ("crashes", _CRASHES),
    ("orderly losses", both(ALL_TRACED, with_faults(Fault.GOODBYE, Fault.WRONG_STEP, per_step=0.2))),
    ("reconnects", both(ALL_TRACED, with_faults(Fault.RESULT_AFTER_RECONNECT, Fault.STALE_EPOCH, per_step=0.2))),
    ("partitions", both(ALL_TRACED, with_limits(step_deadline_s=0.2), with_faults(Fault.FREEZE, per_step=0.2))),
    ("poison", both(ALL_TRACED, with_faults(Fault.POISON, per_request=0.1))),
    (
        "poison and slow readers",
        both(
            ALL_TRACED,
            with_much_rows,
            with_limits(**CONTINUOUS),
            with_traffic(credit_tokens=2),
            with_faults(Fault.POISON, Fault.CRASH, per_step=0.02, per_request=0.05),
        ),
    ),
    ("drains", both(ALL_TRACED, with_several, with_faults(Fault.DRAIN, per_100_steps=5.0))),
    (
        "drains without memory",
        both(with_little_memory, with_limits(worker_wait_s=0.1), with_faults(Fault.DRAIN, per_100_steps=5.0)),
    ),
    (
        "drains with reconnects",
        both(
            ALL_TRACED,
            with_several,
            with_faults(Fault.DRAIN, Fault.RESULT_AFTER_RECONNECT, per_100_steps=5.0, per_step=0.1),
        ),
    ),
    ("moves", with_moves),
    (
        "losses",
        both(
            ALL_TRACED,
            with_limits(**CONTINUOUS),
            with_several,
            with_faults(Fault.CRASH, Fault.IDLE_CRASH, per_step=0.05),
        ),
    ),
    ("restarts", both(with_limits(max_queued_requests=4), with_faults(Fault.CORE_RESTART))),
    (
        "clients that come back",
        both(
            with_extras,
            with_traffic(identified=0.9, scored=0.5, embeds=0.0),
            with_faults(Fault.CORE_RESTART, per_100_steps=2.0),
        ),
    ),
    ("logs that expire", with_short_logs),
    ("grammars", with_extras),
    ("grammars of several workers", both(with_extras, with_several)),
    ("tenants that run one request", with_quota(max_running=1)),
    ("tenants that queue two requests", with_quota(max_queued=2)),
    ("token rates", with_rates),
    ("fair", _FAIR),
    (
        "fair and overload",
        both(
            with_much_memory,
            with_limits(policy="fair", classes={}, tenant_weights={"a": 8.0, "b": 8.0}, **CONTINUOUS),
            with_overload,
        ),
    ),
    (
        "deadlines",
        both(
            with_much_memory,
            with_limits(policy="edf", **CONTINUOUS),
            with_traffic(deadlines=0.4, longest_prompt=3, families=0),
        ),
    ),
    (
        "lengths",
        both(with_much_memory, with_limits(policy="sjf", **CONTINUOUS), with_faults(Fault.GOODBYE, per_step=0.05)),
    ),
    (
        "prefixes and overload",
        both(
            with_much_memory,
            with_overload,
            with_limits(policy="lpm", classes={}, prefix_cache="hash", long_prefill_token_threshold=3, **CONTINUOUS),
            with_traffic(embeds=0.1),
            with_faults(Fault.GOODBYE, Fault.CANCEL, per_step=0.02, per_request=0.1),
        ),
    ),
    ("groups that wait for one prefix", with_groups),
    ("drafts", with_drafts_and_a_rate),
    ("drafts and swaps", both(with_drafts, with_swaps)),
    ("swaps", both(with_swaps, with_faults(Fault.CRASH, Fault.FAILED_ROW, Fault.CANCEL, per_step=0.02))),
    ("host cache", both(with_host_cache, with_faults(Fault.CRASH, Fault.CANCEL, Fault.DRAIN, per_step=0.01))),
    (
        "host cache and spoilt rows",
        both(
            with_host_cache,
            with_slow_copies,
            with_limits(prefix_cache="radix"),
            with_faults(Fault.SPOILT_ROW, per_step=0.02),
        ),
    ),
    ("disk", both(with_disk, with_faults(Fault.CRASH, Fault.CANCEL, Fault.CORE_RESTART, per_step=0.01))),
    (
        "bad disk",
        both(with_disk, with_few_slots, with_bad_disk, with_faults(Fault.SPOILT_ROW, Fault.STALE_EPOCH, per_step=0.01)),
    ),
    ("recurrent state", both(with_few_words, with_state, with_faults(Fault.CRASH, Fault.CANCEL, per_step=0.02))),
    ("recurrent state and little memory", both(with_swaps, with_state)),
    ("swapped states", both(with_swaps, with_host_states(4), with_faults(Fault.CRASH, Fault.CANCEL, per_step=0.02))),
    ("few places for swapped states", both(with_swaps, with_host_states(1))),
    (
        "swapped states and checkpoints",
        both(
            with_checkpoints(8),
            with_swaps,
            with_limits(prefix_cache="hash"),
            with_host_states(3),
            with_faults(Fault.CRASH, Fault.SPOILT_ROW, per_step=0.02),
        ),
    ),
    (
        "checkpoints",
        both(with_checkpoints(40), with_faults(Fault.CRASH, Fault.CANCEL, Fault.FAILED_ROW, Fault.SPOILT_ROW)),
    ),
    (
        "states in the host cache",
        both(with_states_in_host_cache(40, 30), with_faults(Fault.CRASH, Fault.CANCEL, Fault.DRAIN, per_step=0.01)),
    ),
    (
        "few states in the host cache",
        both(with_states_in_host_cache(6, 5), with_faults(Fault.CRASH, Fault.CANCEL, per_step=0.01)),
    ),
    (
        "states in a slow host cache, and bad rows",
        both(
            with_states_in_host_cache(10, 12),
            with_slow_copies,
            with_faults(Fault.FAILED_ROW, Fault.SPOILT_ROW, per_step=0.02),
        ),
    ),
    (
        "few host blocks with states, and drafts",
        both(with_states_in_host_cache(12, 12), with_few_host_blocks, with_drafts),
    ),
    ("few checkpoints", both(with_checkpoints(3), with_faults(Fault.CRASH, Fault.CANCEL, per_step=0.02))),
    ("windows", both(with_few_words, with_windows(5), with_faults(Fault.CRASH, Fault.CANCEL, per_step=0.02))),
    ("windows and little memory", both(with_swaps, with_windows(9, 3, num_groups=2))),
    (
        "windows and bad rows",
        both(with_few_words, with_windows(7), with_faults(Fault.FAILED_ROW, Fault.SPOILT_ROW, per_step=0.02)),
    ),
    ("windows and urgent requests", both(with_little_memory, with_windows(3, 2, num_groups=2))),
    (
        "swapped windows",
        both(
            with_few_words,
            with_swaps,
            with_windows(7, 3),
            with_limits(prefix_cache="hash"),
            with_faults(Fault.CRASH, Fault.CANCEL, Fault.SPOILT_ROW, per_step=0.02),
        ),
    ),
    ("swapped windows and drafts", both(with_drafts, with_swaps, with_windows(5, 1))),
    (
        "windows in host memory",
        both(with_windows_on_host(7, 3), with_faults(Fault.CRASH, Fault.CANCEL, Fault.SPOILT_ROW, per_step=0.02)),
    ),
    ("windows in little host memory", both(with_windows_on_host(9, 12, num_groups=2), with_few_host_blocks)),
    (
        "windows in host memory and slow copies",
        both(with_windows_on_host(5, 4), with_slow_copies, with_traffic(conversations=0.7)),
    ),
    ("urgent requests", with_little_memory),
    ("few words", with_few_words),
    ("parts of blocks", both(with_few_words, with_limits(prefix_cache="radix"))),
    ("spoilt rows", both(with_few_words, with_traffic(traced=1.0), with_faults(Fault.SPOILT_ROW, per_step=0.1))),
    ("long freezes", with_long_freezes),
    ("long prompts", with_long_prompts),
    ("slow readers", with_few_rows),
    ("fair and interruptions", both(_FAIR, with_faults(Fault.GOODBYE, per_step=0.1))),
    ("urgent requests of two classes", both(with_little_memory, with_limits(classes=_CLASSES))),
    (
        "compiling workers",
        both(ALL_TRACED, with_limits(step_deadline_s=0.2), with_faults(Fault.COMPILING, per_step=0.1)),
    ),
    (
        "two plans and freezes",
        both(
            ALL_TRACED, with_limits(max_plans_in_flight=2), with_faults(Fault.FREEZE, Fault.LATE_RESULT, per_step=0.05)
        ),
    ),
    ("deadlines and a backlog", with_deadlines),
    ("sessions", with_sessions),
    ("retained sessions", with_retention),
)
"""Every adaptation, with a name."""


def draw_world(seed: int) -> Scenario:
    """Generate a seed's scenario. Every second scenario gets one of the adaptations in turn."""
    scenario = draw(seed)
    turn, is_adapted = divmod(seed, 2)
    return AIMS[turn % len(AIMS)][1](scenario) if is_adapted else scenario


def adaptation(name: str) -> Aim:
    """Return the adaptation with this name."""
    return dict(AIMS)[name]
