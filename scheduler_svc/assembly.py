"""Builds the parts of the service from the configuration."""

import dataclasses
from pathlib import Path

from quire import __version__
from scheduler_svc.admission_file import AdmissionSettings
from scheduler_svc.core.interface.config import BatchingLimits, CoreConfig
from scheduler_svc.journal.journal import Journal
from scheduler_svc.journal.recovery import Found
from scheduler_svc.journal.segments import NewerJournalError
from scheduler_svc.recorder.recorder import Recorder
from shared.config import ConfigError, SchedulerConfig, state_folder
from shared.curve import DOMAINS, SCHEDULER, STANDBY_DOMAIN, CurveKeys
from shared.folder_lock import FolderInUseError
from shared.logging import get_logger
from shared.sockets import Protect

NO_BUDGET = 1 << 24
"""Effectively unlimited token budget. Each worker's own limit applies."""
ALL_ROWS = 1 << 16
"""Effectively unlimited number of running requests. Each worker's own limit applies."""
_MAX_FOLDERS = 16
"""Maximum number of record folders for schedulers without a configured port. Each such scheduler takes a free
folder.
"""


def to_core_config(config: SchedulerConfig, admission: AdmissionSettings) -> CoreConfig:
    """Return the core's part of the configuration.

    Raises:
        InvalidLimitsError: limits contradict each other.
    """
    max_tokens = config.max_num_batched_tokens or NO_BUDGET
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
        session_wait_s=config.session_wait_s,
        retention_share=config.retention_share,
        policy_preemption=config.policy_preemption,
        preempt_threshold=config.preempt_threshold,
        victim_rule=config.victim_rule,
        max_num_seqs=config.max_num_seqs or min(ALL_ROWS, max_tokens),
        max_num_batched_tokens=max_tokens,
        itl_target_s=config.itl_target_ms / 1000,
        slo_ttft_s=config.slo_ttft_ms / 1000,
        slo_ttft_token_s=config.slo_ttft_token_us / 1e6,
        preempt_priority_difference=config.preempt_priority_difference,
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


def shown_settings(core: CoreConfig) -> dict[str, str]:
    """Return the core's settings as text, without tenant limits and request classes."""
    values = {each.name: getattr(core, each.name) for each in dataclasses.fields(core)}
    shown = {name: value for name, value in values.items() if isinstance(value, str | int | float | bool)}
    shown |= {f"batching.{name}": value for name, value in dataclasses.asdict(core.batching).items()}
    unlimited = {"max_num_seqs": ALL_ROWS, "max_num_batched_tokens": NO_BUDGET}
    return {name: "each worker's own" if unlimited.get(name) == value else str(value) for name, value in shown.items()}


def open_journal(config: SchedulerConfig, found: Found | None = None) -> Journal | None:
    """Open the journal, whose content may be known; return None if it is off.

    Raises:
        ConfigError: the folder cannot be used, or the journal would have no effect.
    """
    if not config.journal:
        return None
    if not config.resume_keep_s:
        raise ConfigError(
            "journal (--journal): has no effect with resume_keep_s 0; raise resume_keep_s or remove --journal"
        )
    try:
        return Journal(
            Path(config.journal),
            max_bytes=config.journal_bytes,
            keep_s=config.resume_keep_s,
            fsync=config.journal_fsync,
            found=found,
        )
    except OSError as error:
        raise ConfigError(f"journal (--journal): {error}; use a folder that only this scheduler writes to") from None
    except NewerJournalError as error:
        raise ConfigError(
            f"journal (--journal): {error}; start the release that wrote the journal, or use another folder"
        ) from None


def open_recorder(config: SchedulerConfig, core: CoreConfig, incarnation: int) -> Recorder | None:
    """Start the flight recorder; return None if it is off, or, with a logged warning, if its folder is unusable."""
    if config.record_dir in ("", "off"):
        return None
    folders = [Path(config.record_dir)]
    if config.record_dir == "auto":
        anywhere = state_folder() / "record" / "any"
        folders = [anywhere, *(anywhere.with_name(f"any-{number}") for number in range(2, _MAX_FOLDERS + 1))]
    for folder in folders:
        try:
            return Recorder(
                folder,
                max_bytes=config.record_bytes,
                config=core,
                incarnation=incarnation,
                release=__version__,
                with_tokens=config.record_tokens,
            )
        except (OSError, RuntimeError) as error:
            if isinstance(error, FolderInUseError) and folder != folders[-1]:
                continue
            then = "use another --record-dir, or 'off'"
            get_logger().warning("flight recorder: not recording", folder=str(folder), reason=str(error), then=then)
            return None
    return None


def protector(keys: CurveKeys | None, role: str) -> Protect:
    """Return the function that sets up encryption on the socket for peers of a role."""
    if keys is None:
        return lambda _socket: None
    domain = STANDBY_DOMAIN if role == SCHEDULER else DOMAINS[role]
    return lambda socket: keys.protect_server(socket, domain)
