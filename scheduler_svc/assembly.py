"""From the process's configuration to the parts of the service."""

from pathlib import Path

from scheduler_svc.admission_file import AdmissionSettings
from scheduler_svc.core.batching import BatchingLimits
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.journal.journal import Journal
from shared.config import ConfigError, SchedulerConfig
from shared.curve import DOMAINS, CurveKeys
from shared.sockets import Protect

_NO_BUDGET = 1 << 24
"""More tokens than any worker computes in a step: each worker says what it does."""


def to_core_config(config: SchedulerConfig, admission: AdmissionSettings) -> CoreConfig:
    """The part of the configuration that decides.

    Raises:
        InvalidLimitsError: limits that contradict each other.
    """
    return CoreConfig(
        policy=config.policy,
        classes=admission.classes,
        tenant_limits=admission.tenant_limits,
        tenant_weights=admission.tenant_weights,
        prefix_cache=config.prefix_cache,
        capacity=config.capacity,
        batching=BatchingLimits(
            mode=config.batching,
            max_batch_size=config.max_batch_size,
            max_wait_s=config.max_wait_ms / 1000,
            max_tokens_per_batch=config.max_tokens_per_batch,
            delay_factor=config.scheduler_delay_factor,
        ),
        policy_preemption=config.policy_preemption,
        preempt_threshold=config.preempt_threshold,
        victim_rule=config.victim_rule,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or _NO_BUDGET,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_tokens_in_paged_kv_cache=config.max_tokens_in_paged_kv_cache,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        max_plans_in_flight=config.max_plans_in_flight,
        worker_wait_s=config.worker_wait_s,
        step_deadline_s=config.step_deadline_s,
        stall_timeout_s=config.stall_timeout_s,
        resume_keep_s=config.resume_keep_s,
        resume_keep_bytes=config.resume_keep_bytes,
    )


def open_journal(config: SchedulerConfig) -> Journal | None:
    """The journal, or None where none is wanted.

    Raises:
        ConfigError: it cannot be kept, or would be of no use.
    """
    if not config.journal:
        return None
    if not config.resume_keep_s:
        raise ConfigError("journal (--journal): of no use with resume_keep_s 0, which keeps nothing for Resume")
    try:
        return Journal(
            Path(config.journal),
            max_bytes=config.journal_bytes,
            keep_s=config.resume_keep_s,
            fsync=config.journal_fsync,
            fsync_interval_s=config.journal_fsync_interval_s,
        )
    except OSError as error:
        raise ConfigError(f"journal (--journal): {error}; give a folder that only this scheduler writes") from None


def protector(keys: CurveKeys | None, role: str) -> Protect:
    """What protects the socket for peers of a role."""
    if keys is None:
        return lambda _socket: None
    return lambda socket: keys.protect_server(socket, DOMAINS[role])
