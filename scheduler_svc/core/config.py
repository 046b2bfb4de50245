"""The limits that steer the core's decisions."""

import math
from dataclasses import dataclass, field

from scheduler_svc.core.batching import BATCHING_MODES, BatchingLimits
from scheduler_svc.core.capacity import CAPACITY_MODES
from scheduler_svc.core.errors import InvalidLimitsError
from scheduler_svc.core.victims import VICTIM_RULES

POLICIES = ("fcfs", "priority", "sjf", "edf", "fair", "lpm")
PREEMPTIVE_POLICIES = ("priority", "edf")
"""Policies under which a waiting request may rank so far ahead of a running one that it pauses it."""


PREFIX_CACHES = ("radix", "hash", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have at once; 0: no limit."""

    max_running: int = 0
    max_queued: int = 0
    tokens_per_s: float = 0.0
    """Prompt and output tokens over time; bursts of ten seconds' worth are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """Requests with an order of admission of their own; classes share the service by weight."""

    policy: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """See `shared.config.SchedulerConfig` for what each limit means; times are seconds."""

    policy: str = "fcfs"
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`; 1 for those not named."""
    classes: dict[str, RequestClass] = field(default_factory=dict)
    """Request classes by name; a request of none of them falls under `policy`, with weight 1."""
    prefix_cache: str = "hash"
    """One of PREFIX_CACHES."""
    capacity: str = "max_utilization"
    batching: BatchingLimits = field(default_factory=BatchingLimits)
    policy_preemption: str = "auto"
    """"on": a waiting request may pause running ones that rank behind it; "auto": where policy and capacity allow."""
    preempt_threshold: float = 5.0
    """By how much, in the policy's seconds, a running request must rank behind to be paused."""
    victim_rule: str = "fewest"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 4096
    max_queued_tokens: int = 1 << 24
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request in a step; 0: the whole budget."""
    max_tokens_in_paged_kv_cache: int = 0
    """Most tokens in the KV cache of a worker; 0: what its memory holds."""
    tenant_limits: dict[str, TenantLimits] = field(default_factory=dict)
    """By tenant; the entry "" is for tenants not named."""
    max_plans_in_flight: int = 2
    worker_wait_s: float = 60.0
    step_deadline_s: float = 120.0
    stall_timeout_s: float = 60.0
    resume_keep_s: float = 300.0
    resume_keep_bytes: int = 64 << 20
    watermark: float = 0.01
    """Share of a worker's blocks that admission leaves free, so that running requests can grow."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise InvalidLimitsError(f"{name} must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidLimitsError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}): every running request takes one token of each step"
            )
        for name, policy in (("policy", self.policy), *((f"class {n}", c.policy) for n, c in self.classes.items())):
            if policy not in POLICIES:
                raise InvalidLimitsError(f"{name}: {policy!r} is none of the policies {', '.join(POLICIES)}")
        weights = {f"tenant {name}": weight for name, weight in self.tenant_weights.items()}
        weights |= {f"class {name}": each.weight for name, each in self.classes.items()}
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise InvalidLimitsError(f"{name}: the weight {weight} must be larger than 0")
        for name, value, known in (
            ("capacity", self.capacity, CAPACITY_MODES),
            ("batching", self.batching.mode, BATCHING_MODES),
            ("victim_rule", self.victim_rule, VICTIM_RULES),
            ("prefix_cache", self.prefix_cache, PREFIX_CACHES),
            ("policy_preemption", self.policy_preemption, ("auto", "on", "off")),
        ):
            if value not in known:
                raise InvalidLimitsError(f"{name} {value!r} is none of {', '.join(known)}")
        if self.policy_preemption == "on" and self.capacity == "guaranteed_no_evict":
            raise InvalidLimitsError(
                "policy_preemption on contradicts capacity guaranteed_no_evict, which never pauses a started request"
            )
        if self.max_plans_in_flight not in (1, 2):
            raise InvalidLimitsError("max_plans_in_flight must be 1 or 2")

    def policy_of(self, request_class: str) -> str:
        """The order of admission that requests of a class wait in."""
        known = self.classes.get(request_class)
        return self.policy if known is None else known.policy

    def same_class(self, one: str, other: str) -> bool:
        """Whether requests of two classes wait in one queue."""
        return one == other or (one not in self.classes and other not in self.classes)
