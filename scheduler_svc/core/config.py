"""The limits that steer the core's decisions."""

from dataclasses import dataclass, field


class InvalidLimitsError(ValueError):
    """Limits that contradict each other; the message names them and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """See `shared.config.SchedulerConfig` for what each limit means; times are seconds."""

    policy: str = "fcfs"
    tenant_weights: dict[str, float] = field(default_factory=dict)
    """Shares of tenants under `fair`; 1 for those not named."""
    prefix_cache: str = "hash"
    """"hash" or "off"."""
    policy_preemption: bool = True
    """Whether a waiting request may pause running ones that rank behind it; only `priority` and `edf` rank so."""
    preempt_threshold: float = 5.0
    """By how much, in the policy's seconds, a running request must rank behind to be paused."""
    victim_rule: str = "fewest"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 4096
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
        if self.max_plans_in_flight not in (1, 2):
            raise InvalidLimitsError("max_plans_in_flight must be 1 or 2")
