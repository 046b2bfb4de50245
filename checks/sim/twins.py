"""Compares two simulations with the same load that differ in one respect.

Users must notice only the promised differences.

* `PURPOSES`: a policy serves what it is for earlier than `fcfs` does, on average over a load.
* The backlog of a tenant at its limit changes nothing for others, to the microsecond.

The load is generated from a seed. One worker serves it, and steps with equal work take equally long, so the outcomes
differ only because of the core's decisions.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from records.rules.violation import ViolationError
from records.whatif.load import Arrival, Member, traced
from records.whatif.simulate import START_S, simulate
from records.whatif.step_times import StepTimes
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import POLICIES, CoreConfig, TenantLimits
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import EndReason, Peer
from scheduler_svc.core.scheduler import Scheduler

_BLOCK = 4
_NUM_REQUESTS = 40
_SHARED = 48
"""Tokens of a shared prefix."""
_HELD = "held"
"""The tenant whose requests wait for its limit."""
_MOST_HELD = 400
"""Tokens of its request that runs meanwhile."""


@dataclass(slots=True)
class Served:
    """Each request's outcome, by position in the load; times in seconds since the start."""

    arrivals: Sequence[Arrival]
    first: dict[int, float] = field(default_factory=dict)
    """Time of the first token."""
    ends: dict[int, tuple[float, EndReason, int]] = field(default_factory=dict)
    """Time, reason and prompt tokens from the cache."""

    def ttft(self, number: int) -> float:
        """Return the time to the first token; to the end if there is none."""
        return self.first.get(number, self.ends[number][0]) - self.arrivals[number].at

    def latency(self, number: int) -> float:
        """Return the time to the end."""
        return self.ends[number][0] - self.arrivals[number].at

    def is_late(self, number: int) -> bool:
        """Return whether the request missed its target for the first token."""
        target = self.arrivals[number].ttft_deadline
        return target is not None and self.ttft(number) > target

    def computed(self, number: int) -> float:
        """Return the share of its prompt that was not in the cache."""
        return 1 - self.ends[number][2] / self.arrivals[number].spec.num_prompt_tokens


Measure = Callable[[Served], float]


def _mean(value: Callable[[Served, int], float], counts: Callable[[Arrival], bool] = lambda arrival: True) -> Measure:
    """Return the mean of a value over the requests that count."""

    def measure(served: Served) -> float:
        values = [value(served, number) for number, each in enumerate(served.arrivals) if counts(each)]
        return sum(values) / max(1, len(values))

    return measure


def _has_target(arrival: Arrival) -> bool:
    return arrival.ttft_deadline is not None


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a policy is for."""

    what: str
    measure: Measure
    most: float
    """Largest permitted ratio to the value under `fcfs`; chosen above the values in 60 random loads."""
    spare: float = 0.0
    """Value that may be added, for small shares."""


PURPOSES = {
    "priority": Purpose("mean TTFT of priority 3", _mean(Served.ttft, lambda each: each.spec.priority == 3), 0.5),
    "sjf": Purpose("mean latency", _mean(Served.latency), 0.96),
    "edf": Purpose("share of missed targets", _mean(Served.is_late, _has_target), 1.0, 0.15),
    "slo": Purpose("share of missed targets", _mean(Served.is_late), 0.8, 0.05),
    "lpm": Purpose("share of prompt tokens computed", _mean(Served.computed), 0.9),
    "fair": Purpose("mean TTFT of the small tenant", _mean(Served.ttft, lambda each: each.spec.tenant == "b"), 2.0),
    "balanced": Purpose("mean TTFT of short prompts", _mean(Served.ttft, lambda each: each.num_tokens == 8), 1.01),
}


class _Observed(Scheduler):
    """A core whose effects are recorded."""

    served: Served

    def handle(self, event: ev.Event, now: float) -> list[ef.Effect]:
        return self._record(super().handle(event, now), now)

    def plan(self, peer: Peer, now: float) -> tuple[Plan | None, list[ef.Effect]]:
        plan, effects = super().plan(peer, now)
        return plan, self._record(effects, now)

    def _record(self, effects: list[ef.Effect], now: float) -> list[ef.Effect]:
        for effect in effects:
            if isinstance(effect, ef.TokensReady):
                for stream in effect.streams.tolist():
                    self.served.first.setdefault(stream, now - START_S)
            elif isinstance(effect, ef.RequestEnded):
                self.served.ends[effect.stream] = now - START_S, effect.reason, effect.cached_prompt_tokens
        return effects


@dataclass(frozen=True, slots=True)
class _Load:
    arrivals: list[Arrival]
    member: Member
    config: CoreConfig
    times: StepTimes

    def serve(self, arrivals: Sequence[Arrival] | None = None, **settings: str) -> Served:
        """Serve the load, or other requests, with these settings changed."""
        served = Served(self.arrivals if arrivals is None else arrivals)

        def make_core(*arguments: object) -> Scheduler:
            core = _Observed(*arguments)  # type: ignore[arg-type]
            core.served = served
            return core

        config = replace(self.config, **settings)  # type: ignore[arg-type]
        simulate(served.arrivals, [self.member], config, self.times, make_core=make_core)
        return served


def check_purpose(seed: int, policy: str = "") -> None:
    """Check that a policy serves its purpose better than `fcfs`. If no policy is given, the seed determines it."""
    policy = policy or random.Random(f"purpose of {seed}").choice(list(PURPOSES))
    purpose = PURPOSES[policy]
    load = _draw(random.Random(f"{policy} {seed}"), policy)
    own, first_come = purpose.measure(load.serve()), purpose.measure(load.serve(policy="fcfs"))
    if own > purpose.most * first_come + purpose.spare:
        what = f"{purpose.what} under {policy} is {own:.4g}, under fcfs {first_come:.4g}"
        raise ViolationError("order.purpose", what)


def check_backlog(seed: int) -> None:
    """Check that requests beyond a tenant's limit change nothing for other tenants."""
    rng = random.Random(f"backlog {seed}")
    load = _draw(rng, rng.choice(POLICIES), deadlines=0.5)
    others = [replace(each, at=each.at + 10 * load.times.constant_s) for each in load.arrivals]
    limits = rng.choice((TenantLimits(max_running=1), TenantLimits(tokens_per_s=0.01)))
    hello = replace(load.member.hello, num_blocks=load.member.hello.num_blocks + _MOST_HELD // _BLOCK)
    config = replace(load.config, tenant_limits={_HELD: limits}, policy_preemption="off")
    load = replace(load, config=config, member=replace(load.member, hello=hello))
    # One request starts first, runs for the whole simulation, and takes the tenant's entire share.
    runs = _held(0.0, 8, _MOST_HELD - 8)
    alone = load.serve([runs, *others])
    until = alone.ends[0][0]
    times = [rng.uniform(others[0].at, max(each.at for each in others)) + 1e-6 for _ in others]
    backlog = [
        replace(_held(at, rng.choice((8, 60)), 4), end=EndReason.CANCELLED, cancelled_after=until - at) for at in times
    ]
    beside = load.serve(sorted([runs, *others, *backlog], key=lambda each: each.at))
    served = [number for number, each in enumerate(beside.arrivals) if each.spec.tenant != _HELD]
    for number, at in enumerate(served, start=1):
        without, with_it = _outcome(alone, number), _outcome(beside, at)
        if without != with_it and alone.ends[number][0] < until:
            what = (
                f"request {number} under {load.config.policy}: {without} alone, {with_it} beside a backlog of {_HELD!r}"
            )
            raise ViolationError("tenant.backlog", what)


def _outcome(served: Served, number: int) -> str:
    time, reason, cached = served.ends[number]
    first = served.first.get(number)
    began = "no token" if first is None else f"first token after {first:.6f} s"
    return f"{began}, {reason.name} after {time:.6f} s, {cached} cached tokens"


def _held(at: float, num_prompt: int, num_outputs: int) -> Arrival:
    arrival = traced(at, num_prompt, num_outputs, block_size=_BLOCK)
    return replace(arrival, spec=arrival.spec._replace(tenant=_HELD, priority=3))


def _draw(rng: random.Random, policy: str, *, deadlines: float = 0.0) -> _Load:
    """Generate a load that keeps a worker busy: a burst, then as many requests per second as it can serve.

    Args:
        rng: the generator.
        policy: determines the kind of prompts and targets.
        deadlines: share of requests that are refused if they would miss a deadline.
    """
    shares_prefixes = policy == "lpm"
    rows = rng.choice((1, 2) if shares_prefixes else (2, 3, 4))
    # With targets, some loads take longer than the slack for requests without a target.
    step_s = 10 ** (rng.uniform(-1.5, 0.3) if policy in ("edf", "slo") else rng.uniform(-2.0, -0.7))
    families = rng.randint(6, 8)
    at = 0.0
    arrivals = []
    for number in range(_NUM_REQUESTS // 2 if shares_prefixes else _NUM_REQUESTS):
        if not shares_prefixes and number > _NUM_REQUESTS // 3:
            at += rng.expovariate(rows / (20 * step_s))
        num_prompt, num_outputs = rng.choice((8, 8, 16, 60)), rng.choice((2, 2, 4, 40, 50))
        parts: list[int] = []
        if shares_prefixes:
            num_prompt, num_outputs = _SHARED + _BLOCK, rng.randint(34, 50)
            parts = [rng.randrange(families)]
        arrival = traced(at, num_prompt, num_outputs, parts, part_tokens=_SHARED, block_size=_BLOCK)
        spec = arrival.spec._replace(
            tenant=rng.choice("aaaab"),
            priority=rng.choice((0, 0, 1, 3)),
            expected_output_tokens=num_outputs if policy == "sjf" else 0,
        )
        patience_s = rng.choice((rng.uniform(2, 100), rng.uniform(100, 400))) * 3 * step_s / rows
        has_target = policy == "slo" or (policy == "edf" and rng.random() < 0.7)
        has_deadline = rng.random() < deadlines
        arrivals.append(
            replace(
                arrival,
                spec=spec,
                ttft_deadline=patience_s if has_target else None,
                deadline=patience_s if has_deadline else None,
            )
        )
    num_blocks = rows * 26 + 15 if shares_prefixes else rows * 30
    hello = ev.WorkerHello(
        worker=b"w",
        worker_id="w",
        model=ev.ModelFacts(
            name="m",
            architecture="",
            fingerprint="f",
            max_model_len=4096,
            vocab_size=1 << 30,
            dtype="",
            eos_token_ids=(),
        ),
        block_size=_BLOCK,
        num_blocks=num_blocks,
        max_rows=rows,
        max_tokens_per_step=rows + 64,
    )
    config = CoreConfig(
        policy=policy,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + 64,
        step_deadline_s=1000.0,
        worker_wait_s=1000.0,
        stall_timeout_s=0.0,
    )
    times = StepTimes(
        constant_s=step_s, decode_s=0.0, prefill_s=0.02 * step_s, context_s=0.0, prefill_context_s=0.0,
        block_copy_s=0.0, link_s=0.0,
    )  # fmt: skip
    return _Load(arrivals, Member(hello=hello), config, times)
