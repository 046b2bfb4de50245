"""Limits and policies that steer the core's decisions."""

import math
from dataclasses import dataclass, field

from scheduler_svc.core.interface.errors import InvalidLimitsError

POLICIES = ("balanced", "fcfs", "priority", "sjf", "edf", "slo", "fair", "lpm")
BY_ARRIVAL = ("balanced", "fcfs")
"""Policies that admit requests in arrival order, for which a request's wait can be forecast."""
PREEMPTIVE_POLICIES = ("priority", "edf")
"""Policies under which a waiting request may preempt a running request of much lower rank."""
PREFIX_CACHES = ("radix", "hash", "off")
CAPACITY_MODES = ("max_utilization", "guaranteed_no_evict")
BATCHING_MODES = ("continuous", "static", "dynamic")
VICTIM_RULES = ("fewest", "youngest", "lowest_priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingLimits:
    """Limits of the batch gate. Times are in seconds, and 0 tokens means no limit."""

    mode: str = "continuous"
    max_batch_size: int = 16
    max_wait_s: float = 0.05
    max_tokens_per_batch: int = 0
    delay_factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Limits for one tenant; 0 means no limit."""

    max_running: int = 0
    max_queued: int = 0
    tokens_per_s: float = 0.0
    """Rate of prompt and output tokens in tokens/s. Bursts of up to ten seconds' worth are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestClass:
    """A request class with its own admission order. Classes share the service by weight."""

    policy: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Configuration of the core; see `shared.config.SchedulerConfig` for each limit. Times are in seconds."""

    policy: str = "balanced"
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`. Unlisted tenants have 1."""
    classes: dict[str, RequestClass] = field(default_factory=dict)
    """Request classes by name. Requests without a configured class use `policy` with weight 1."""
    prefix_cache: str = "hash"
    """One of PREFIX_CACHES."""
    capacity: str = "max_utilization"
    batching: BatchingLimits = field(default_factory=BatchingLimits)
    session_wait_s: float = 300.0
    """Longest wait of a new session for memory for its working set; 0 if new sessions do not wait."""
    retention_share: float = 0.5
    """Part of a worker's KV blocks that requests can retain for a time of their choice."""
    policy_preemption: str = "auto"
    """"on" if a waiting request may preempt running requests of lower rank; "auto" if policy and capacity decide."""
    preempt_threshold: float = 5.0
    """Minimum difference in rank for a preemption, in seconds of the policy's key."""
    preempt_priority_difference: float = 0.0
    """Minimum difference in priority for a preemption under `priority`; 0 for any difference."""
    slo_ttft_s: float = 2.0
    """Under `slo`, TTFT target in seconds for requests without `ttft_target`."""
    slo_ttft_token_s: float = 125e-6
    """Under `slo`, time added to this target per prompt token, in seconds."""
    victim_rule: str = "fewest"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    itl_target_s: float = 0.0
    """Maximum inter-token gap that other requests' prompts may cause, in seconds; 0 for no target."""
    max_queued_requests: int = 4096
    max_queued_tokens: int = 1 << 24
    long_prefill_token_threshold: int = 0
    """Maximum prompt tokens per request and step; 0 for the whole budget."""
    max_tokens_in_paged_kv_cache: int = 0
    """Maximum number of tokens in a worker's KV cache; 0 for as many as fit into its memory."""
    tenant_limits: dict[str, TenantLimits] = field(default_factory=dict)
    """Limits by tenant. The entry "" applies to unlisted tenants."""
    max_plans_in_flight: int = 2
    worker_wait_s: float = 60.0
    step_deadline_s: float = 120.0
    stall_timeout_s: float = 60.0
    resume_keep_s: float = 300.0
    resume_keep_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests"):
            if getattr(self, name) < 1:
                raise InvalidLimitsError(f"{name}: {getattr(self, name)} is too small; use at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidLimitsError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} is less than max_num_seqs"
                f" ({self.max_num_seqs}), but every running request takes one token of each step; raise it or lower"
                " max_num_seqs"
            )
        for name, policy in (("policy", self.policy), *((f"class {n}", c.policy) for n, c in self.classes.items())):
            if policy not in POLICIES:
                raise InvalidLimitsError(f"{name}: unknown policy {policy!r}; use one of {', '.join(POLICIES)}")
        weights = {f"tenant {name}": weight for name, weight in self.tenant_weights.items()}
        weights |= {f"class {name}": each.weight for name, each in self.classes.items()}
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise InvalidLimitsError(f"{name}: the weight {weight} is not a finite number above 0; use one")
        for name, value, known in (
            ("capacity", self.capacity, CAPACITY_MODES),
            ("batching", self.batching.mode, BATCHING_MODES),
            ("victim_rule", self.victim_rule, VICTIM_RULES),
            ("prefix_cache", self.prefix_cache, PREFIX_CACHES),
            ("policy_preemption", self.policy_preemption, ("auto", "on", "off")),
        ):
            if value not in known:
                raise InvalidLimitsError(f"{name}: unknown value {value!r}; use one of {', '.join(known)}")
        if self.policy_preemption == "on" and self.capacity == "guaranteed_no_evict":
            raise InvalidLimitsError(
                "policy_preemption: on contradicts capacity guaranteed_no_evict, which never preempts a started"
                " request; use auto or off, or capacity max_utilization"
            )
        if not 0.0 <= self.retention_share <= 1.0:
            raise InvalidLimitsError(
                f"retention_share: {self.retention_share} is not in [0, 1]; use 0 to retain nothing"
            )
        if self.max_plans_in_flight not in (1, 2):
            raise InvalidLimitsError(f"max_plans_in_flight: {self.max_plans_in_flight} is not supported; use 1 or 2")

    @property
    def serves_short_first(self) -> bool:
        """Whether part of each step's prompt tokens goes to the shortest prompts."""
        is_strict = self.policy == "fcfs" and not self.classes
        return not is_strict and self.batching.mode == "continuous" and not self.batching.delay_factor

    @property
    def holds_sessions(self) -> bool:
        """Whether new sessions may have to wait for memory for their working sets."""
        return self.session_wait_s > 0 and self.prefix_cache != "off" and self.batching.mode == "continuous"

    def policy_of(self, request_class: str) -> str:
        """Return the policy for requests of a class."""
        known = self.classes.get(request_class)
        return self.policy if known is None else known.policy

    def same_class(self, one: str, other: str) -> bool:
        """Return whether requests of the two classes share a queue."""
        return one == other or (one not in self.classes and other not in self.classes)
