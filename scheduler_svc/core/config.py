"""The limits that steer the core's decisions."""

from dataclasses import dataclass, field

from scheduler_svc.core.batching import BATCHING_MODES, BatchingLimits
from scheduler_svc.core.capacity import CAPACITY_MODES
from scheduler_svc.core.errors import InvalidLimitsError
from scheduler_svc.core.victims import VICTIM_RULES


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have at once; 0: no limit."""

    max_running: int = 0
    max_queued: int = 0
    tokens_per_s: float = 0.0
    """Prompt and output tokens over time; bursts of ten seconds' worth are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """See `shared.config.SchedulerConfig` for what each limit means; times are seconds."""

    policy: str = "fcfs"
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`; 1 for those not named."""
    prefix_cache: str = "hash"
    """"hash" or "off"."""
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
        for name, value, known in (
            ("capacity", self.capacity, CAPACITY_MODES),
            ("batching", self.batching.mode, BATCHING_MODES),
            ("victim_rule", self.victim_rule, VICTIM_RULES),
            ("prefix_cache", self.prefix_cache, ("hash", "off")),
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
