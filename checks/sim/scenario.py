"""The scenario of a simulation, drawn from its seed before the simulation begins.

Sizes are small on purpose. With a dozen blocks and a handful of rows, rare coincidences occur within a second that take
a month in a real pool. A few seeds are larger. Times are chosen so that every limit in `CoreConfig` is reached.
"""

import dataclasses
import random
from dataclasses import dataclass, replace
from typing import Any

from checks.sim.faults import Fault, FaultRates, draw_rates
from scheduler_svc.core.interface.config import (
    BATCHING_MODES,
    CAPACITY_MODES,
    POLICIES,
    PREFIX_CACHES,
    VICTIM_RULES,
    BatchingLimits,
    CoreConfig,
    RequestClass,
    TenantLimits,
)

TENANTS = ("", "a", "b", "c")
_COMPARED_SHARE = 0.1
MODELS = ("f", "g")
"""Model fingerprints. Workers begin with the first one."""


@dataclass(frozen=True, slots=True)
class WorkerSize:
    """Values that a worker states in its hello."""

    block_size: int
    num_blocks: int
    max_rows: int
    max_tokens_per_step: int
    max_model_len: int
    num_host_blocks: int
    num_disk_blocks: int
    break_even_context: int
    max_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations, in seconds."""

    latency: float
    """Latency from one process to another."""
    step: float
    per_token: float
    copy: float
    """Time to copy a block between device and host."""
    turn: float
    """Shortest interval at which the scheduler's loop polls its sockets."""
    tick: float
    """Interval at which the scheduler's loop advances the core's time."""


@dataclass(frozen=True, slots=True)
class DiskShape:
    """The workers' disks."""

    block_s: float = 1e-4
    """Time to copy a block."""
    failures: float = 0.0
    """Share of blocks that are not written, and of files that are damaged."""
    hangs: float = 0.0
    """Share of jobs that take very long."""


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """The distribution of requests."""

    gap_s: float
    """Mean time between bursts."""
    burst: int
    most_live: int
    longest_prompt: int
    context: int
    """Approximate length of the longest sequence that the workers can hold."""
    longest_output: int
    giants: float
    """Fraction of requests whose prompt fills most of the context."""
    alphabet: int
    """Number of distinct tokens in prompts. A small number creates accidental common prefixes."""
    families: int
    """Number of shared prefixes; 0 for none."""
    shared_salt: bool
    deadlines: float
    """Share of requests with a deadline; an equal share has targets."""
    credit_tokens: int
    """Reader window in tokens; 0 disables flow control."""
    traced: float
    """Fraction of traced requests. With 1, the simulator sees every preemption."""
    grammars: float = 0.0
    """Share of requests with a grammar."""
    scored: float = 0.0
    """Share of requests that ask for log-probabilities."""
    identified: float = 0.0
    """Share of requests that clients resume."""
    models: float = 0.0
    """Fraction of requests that name the model for which they were validated."""
    conversations: float = 0.1
    """Fraction of requests that continue the conversation of an earlier one."""
    steps_per_token: float = 5.0
    """Longest deadline, in steps per generated token."""
    embeds: float = 0.0
    """Share of requests for an embedding."""
    retained: float = 0.0
    """Share of requests that retain their KV or announce a pause."""
    named_sessions: float = 0.0
    """Share of requests that name their session; only without a gate for sessions."""


@dataclass(frozen=True, slots=True)
class WindowShape:
    """The layers with a sliding window of the model."""

    num_groups: int = 1
    """Number of KV groups, all but the first with a window."""
    window: int = 0
    chunk: int = 0
    """Maximum number of tokens of one row in a step."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation."""

    seed: int
    config: CoreConfig
    workers: tuple[WorkerSize, ...]
    num_frontends: int
    pace: Pace
    traffic: TrafficShape
    faults: FaultRates
    check_every: int
    """Number of events between two checks of the core's internal invariants."""
    compares: bool = False
    """Whether pairs of simulations with this seed are compared too; see `twins`."""
    state_bytes: int = 0
    """Size of a row's recurrent state; 0 if the model has only KV."""
    num_checkpoints: int = 0
    """Number of recurrent states that each worker can save."""
    num_host_states: int = 0
    """Number of recurrent states that each worker's host memory can hold."""
    disk: DiskShape = DiskShape()
    copies_overlap: bool = False
    """Whether copies between device and host overlap with steps, as on a GPU."""
    windows: WindowShape = WindowShape()

    @property
    def shares_prefixes(self) -> bool:
        """Whether rows may begin with computed tokens of other rows."""
        return self.config.prefix_cache != "off" and (not self.state_bytes or self.num_checkpoints > 0)


def draw(seed: int, *, faults: bool = True) -> Scenario:
    rng = random.Random(seed)
    large = rng.random() < 0.1
    max_num_seqs = rng.randint(13, 48) if large else rng.choice((1, 2, 4, 6, 8, 12))
    config = dataclasses.replace(_draw_config(rng, max_num_seqs), classes=_draw_classes(seed), **_draw_keeping(seed))
    context = rng.choice((16, 40, 80, 160)) * (4 if large else 1)
    workers = tuple(draw_size(rng, config, context) for _ in range(rng.choice((1, 1, 1, 1, 2, 2, 3, 4))))
    step = 10 ** rng.uniform(-3.7, -2.3)
    scenario = Scenario(
        seed=seed,
        config=config,
        workers=workers,
        num_frontends=rng.choice((1, 1, 2, 3)),
        pace=Pace(
            latency=step * 10 ** rng.uniform(-2, 0),
            step=step,
            per_token=step * rng.choice((0.0, 0.01, 0.1)),
            copy=step * 10 ** rng.uniform(-3, 0.5),
            turn=rng.choice((0.0, 0.1, 0.5, 1.0, 1.0)) * step,
            tick=rng.choice((0.05, 0.2, 0.4)),
        ),
        traffic=_with_extras(_draw_traffic(rng, step, context, max_num_seqs, len(workers)), seed),
        faults=_with_poison(draw_rates(rng, step), seed) if faults else FaultRates((), 0.0, (), 0.0, {}),
        check_every=rng.choice((32, 64, 128)),
        state_bytes=_draw_state(seed),
        num_checkpoints=_draw_checkpoints(seed, max_num_seqs),
        num_host_states=random.Random(f"host states of {seed}").choice((0, 1, 2, max_num_seqs)),
        disk=_draw_disk_shape(seed, step),
        copies_overlap=random.Random(f"copies of {seed}").random() < 1 / 2,
    )
    compares = random.Random(f"twins of {seed}").random() < _COMPARED_SHARE
    return replace(_with_thresholds(_with_target(_with_room(scenario, context))), compares=compares)


def _draw_state(seed: int) -> int:
    """Draw the recurrent state of the model. One simulation in eight has a recurrent state."""
    return 64 if random.Random(f"state of {seed}").random() < 1 / 8 else 0


def _draw_checkpoints(seed: int, max_num_seqs: int) -> int:
    """Draw the number of recurrent states that a worker can save: none, few, or enough for all rows."""
    rng = random.Random(f"checkpoints of {seed}")
    return rng.choice((0, 1, 2, rng.randint(2, 8), max_num_seqs, 4 * max_num_seqs, 4 * max_num_seqs))


def draw_size(rng: random.Random, config: CoreConfig, context: int) -> WorkerSize:
    """Draw a worker that the core accepts."""
    block_size = rng.choice((1, 2, 2, 4, 4, 8, 16))
    max_rows = rng.choice((config.max_num_seqs, rng.randint(1, 2 * config.max_num_seqs)))
    # From room for one sequence, where memory is the limit, to room for most rows, where rows are the limit.
    num_blocks = max(1, int(context / block_size * rng.choice((1.0, 1.3, rng.uniform(1.0, max(1.5, 0.5 * max_rows))))))
    return WorkerSize(
        block_size=block_size,
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_tokens_per_step=max_rows + rng.choice((0, 4, 100)),
        max_model_len=rng.choice((4096, 4096, context, max(2, context // 2))),
        num_host_blocks=rng.choice((0, 0, num_blocks // 2, 2 * num_blocks)),
        num_disk_blocks=_draw_disk(num_blocks * block_size, max_rows),
        break_even_context=_draw_break_even(num_blocks * block_size, max_rows),
        max_draft_tokens=_draw_drafts(num_blocks * block_size, max_rows),
    )


def _draw_disk(*facts: int) -> int:
    """Draw the slots on a worker's disk. It has one in one of three simulations; without host memory it is unused."""
    rng = random.Random(f"disk of {facts}")
    return rng.choice((2, 16, 100, 1000)) if rng.random() < 1 / 3 else 0


def _draw_disk_shape(seed: int, step: float) -> DiskShape:
    """Draw the speed of disks, from much faster to much slower than computing, and their faults."""
    rng = random.Random(f"disks of {seed}")
    return DiskShape(
        block_s=step * 10 ** rng.uniform(-3, 1),
        failures=rng.choice((0.0, 0.0, 0.02, 0.3)),
        hangs=rng.choice((0.0, 0.0, 0.01, 0.1)),
    )


def _draw_drafts(*facts: int) -> int:
    """Draw the number of drafts that a worker verifies per row and step. One simulation in three has drafts."""
    rng = random.Random(f"drafts of {facts}")
    return rng.choice((1, 2, 4, 8)) if rng.random() < 1 / 3 else 0


def _draw_break_even(*facts: int) -> int:
    """Choose the cost of attention, from almost nothing to more than all other costs, in one of three simulations."""
    rng = random.Random(f"attention of {facts}")
    return rng.choice((1, 8, 30, 200)) if rng.random() < 1 / 3 else 0


def _draw_config(rng: random.Random, max_num_seqs: int) -> CoreConfig:
    capacity = rng.choice((*CAPACITY_MODES, "max_utilization"))
    preemption = rng.choice(("auto", "on", "off"))
    if capacity == "guaranteed_no_evict" and preemption == "on":
        preemption = "auto"
    limits = {
        tenant: TenantLimits(
            max_running=rng.choice((0, 1, 3)), max_queued=rng.choice((0, 2, 10)), tokens_per_s=rng.choice((0.0, 200.0))
        )
        for tenant in TENANTS
        if rng.random() < 0.6
    }
    return CoreConfig(
        policy=rng.choice(POLICIES),
        tenant_weights={tenant: rng.choice((0.5, 1.0, 4.0)) for tenant in TENANTS if rng.random() < 0.5},
        prefix_cache=rng.choice(PREFIX_CACHES),
        capacity=capacity,
        batching=BatchingLimits(
            mode=rng.choice((*BATCHING_MODES, "continuous", "continuous")),
            max_batch_size=rng.randint(1, max_num_seqs),
            max_wait_s=rng.choice((0.0, 0.05, 0.3)),
            max_tokens_per_batch=rng.choice((0, 20, 200)),
            delay_factor=rng.choice((0.0, 0.0, 0.5, 2.0)),
        ),
        policy_preemption=preemption,
        preempt_threshold=rng.choice((0.0, 0.05, 0.5, 5.0)),
        victim_rule=rng.choice(VICTIM_RULES),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice((0, 3, 8, 30, 100)),
        max_queued_requests=rng.choice((1, 20, 4096, 4096)),
        max_queued_tokens=rng.choice((100, 1000, 1 << 24, 1 << 24)),
        long_prefill_token_threshold=rng.choice((0, 0, 3, 16)),
        max_tokens_in_paged_kv_cache=rng.choice((0, 0, 0, 64)),
        tenant_limits=limits if rng.random() < 0.25 else {},
        max_plans_in_flight=rng.choice((1, 2, 2)),
        worker_wait_s=rng.choice((0.3, 2.0, 10.0)),
        step_deadline_s=rng.choice((0.2, 1.0, 5.0)),
        stall_timeout_s=rng.choice((0.0, 0.1, 0.5, 5.0)),
    )


def _with_poison(rates: FaultRates, seed: int) -> FaultRates:
    """Add requests that kill workers, in one of four simulations."""
    rng = random.Random(f"poison of {seed}")
    if rng.random() < 0.75:
        return rates
    return replace(rates, of_requests=rates.of_requests | {Fault.POISON: 10 ** rng.uniform(-2.5, -1.0)})


def _draw_keeping(seed: int) -> dict[str, Any]:
    """Draw how many logs of resumable requests are retained, and for how long."""
    rng = random.Random(f"keeping of {seed}")
    return {"resume_keep_s": rng.choice((0.01, 0.5, 300.0)), "resume_keep_bytes": rng.choice((2_000, 1 << 28, 1 << 28))}


def _with_extras(traffic: TrafficShape, seed: int) -> TrafficShape:
    """Add grammars, log-probabilities, reconnecting clients and model names, each in one of four simulations."""
    rng = random.Random(f"extras of {seed}")
    shares = [rng.choice((0.1, 0.6)) if rng.random() < 0.25 else 0.0 for _ in range(4)]
    retained = random.Random(f"retention of {seed}").choice((0.0, 0.0, 0.1, 0.6))
    return replace(
        traffic, grammars=shares[0], scored=shares[1], identified=shares[2], models=shares[3], retained=retained
    )


def _with_room(scenario: Scenario, context: int) -> Scenario:
    """Make rows the only scarce resource in one of ten simulations, so that only the admission order matters."""
    rng = random.Random(f"room of {scenario.seed}")
    if rng.random() < 0.9:
        return scenario
    size = scenario.workers[0]
    num_blocks = size.max_rows * -(-2 * context // size.block_size)
    traffic = scenario.traffic
    return replace(
        scenario,
        config=replace(
            scenario.config,
            policy=rng.choice(("fair", "fair", "edf", "lpm")),
            tenant_limits={},
            max_queued_requests=4096,
            max_queued_tokens=1 << 24,
            max_tokens_in_paged_kv_cache=0,
        ),
        workers=(replace(size, num_blocks=num_blocks, max_model_len=4096),),
        traffic=replace(traffic, gap_s=traffic.gap_s / 4, credit_tokens=0, giants=0.0, traced=1.0),
    )


def _with_target(scenario: Scenario) -> Scenario:
    """Set an inter-token latency target in one of four simulations. In half of these, prompts are expensive."""
    rng = random.Random(f"target of {scenario.seed}")
    if rng.random() < 0.75:
        return scenario
    pace = scenario.pace
    if rng.random() < 0.5:
        pace = replace(pace, step=pace.step / 10, per_token=pace.step / 10)
    return replace(
        scenario, pace=pace, config=replace(scenario.config, itl_target_s=pace.step * rng.choice((0.5, 3.0, 30.0)))
    )


def _with_thresholds(scenario: Scenario) -> Scenario:
    """Draw the targets for `slo`, and the minimum difference in priority for preemption."""
    rng = random.Random(f"thresholds of {scenario.seed}")
    return replace(
        scenario,
        config=replace(
            scenario.config,
            preempt_priority_difference=rng.choice((0.0, 0.0, 1.0, 3.0)),
            slo_ttft_s=scenario.pace.step * rng.choice((2.0, 20.0, 200.0)),
            slo_ttft_token_s=scenario.pace.step * rng.choice((0.0, 0.01, 0.1)),
        ),
    )


def _draw_classes(seed: int) -> dict[str, RequestClass]:
    """Add request classes in one of eight simulations; requests use their tenant's name as their class."""
    rng = random.Random(f"classes of {seed}")
    if rng.random() < 0.875:
        return {}
    return {
        name: RequestClass(policy=rng.choice(POLICIES), weight=rng.choice((0.5, 1.0, 4.0))) for name in TENANTS[1:-1]
    }


def _draw_traffic(rng: random.Random, step: float, context: int, max_num_seqs: int, num_workers: int) -> TrafficShape:
    longest_output = rng.choice((context // 4, context // 2, context))
    burst = rng.choice((1, 3, 10, 30))
    # Request rate: from a third to more than twice the workers' capacity.
    per_s = max_num_seqs * num_workers / (step * longest_output / 2) * 10 ** rng.uniform(-0.5, 0.4)
    return TrafficShape(
        gap_s=burst / 2 / per_s,
        burst=burst,
        most_live=rng.choice((3, 8, 16, 50)) + 2 * max_num_seqs,
        longest_prompt=max(2, rng.choice((context // 8, context // 3, context // 2))),
        context=context,
        longest_output=longest_output,
        giants=rng.choice((0.0, 0.0, 0.03, 0.1)),
        alphabet=rng.choice((2, 20, 900)),
        families=rng.choice((0, 1, 4)),
        shared_salt=rng.random() < 0.5,
        deadlines=rng.choice((0.0, 0.1, 0.4)),
        credit_tokens=rng.choice((0, 1, 4, 16, 16, 64, 64)),
        traced=rng.choice((1.0, 1.0, 1.0, 0.3, 0.0)),
        embeds=rng.choice((0.0, 0.0, 0.1, 0.4)),
    )
