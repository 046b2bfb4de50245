"""Applies changed settings, given as `name=value` on the command line, to the configuration in a record.

Names and values are those of the scheduler's flags. Limits that workers also have (`max_num_seqs`,
`max_num_batched_tokens`) are changed in both, as in `quire serve`. Of the worker flags, only `disk_cache_bytes`,
`speculation=off` and `speculative_tokens` can be set. A record shows which drafts were accepted, but not how they were
proposed.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from scheduler_svc.admission_file import AdmissionSettings
from scheduler_svc.assembly import ALL_ROWS, NO_BUDGET, to_core_config
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from shared.config import ConfigError, SchedulerConfig, WorkerConfig, parse_bytes
from shared.config_sources import parse_setting
from shared.kv_sizes import count_disk_blocks

_OF_WORKERS = {"max_num_seqs": "max_rows", "max_num_batched_tokens": "max_tokens_per_step"}
"""Settings that also limit workers, with the name of the field in a worker's hello."""
_SPECULATION = ("speculation", "speculative_tokens")
"""Settings that only workers have."""
_DISK = "disk_cache_bytes"
"""Setting that only workers have: the size of the disk in bytes; 0 for none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Changed:
    """A configuration with changed settings."""

    config: CoreConfig
    of_workers: dict[str, int]
    """Changed fields in the hello of every worker."""
    disk_bytes: int | None = None
    """Changed size of every worker's disk; None for no change."""

    def apply(self, hello: ev.WorkerHello) -> ev.WorkerHello:
        """Return the hello of a worker with the changed limits.

        Raises:
            ConfigError: the worker cannot have a disk.
        """
        values = dict(self.of_workers)
        rows = values.get("max_rows", hello.max_rows)
        # A worker's token budget is at least its maximum number of rows.
        tokens = values.get("max_tokens_per_step", hello.max_tokens_per_step)
        return dataclasses.replace(
            hello,
            max_rows=rows,
            max_tokens_per_step=max(tokens, rows),
            max_draft_tokens=values.get("max_draft_tokens", hello.max_draft_tokens),
            num_disk_blocks=hello.num_disk_blocks if self.disk_bytes is None else self._num_disk_blocks(hello),
        )

    def _num_disk_blocks(self, hello: ev.WorkerHello) -> int:
        assert self.disk_bytes is not None
        if not self.disk_bytes:
            return 0
        if hello.num_kv_groups > 1:
            raise ConfigError(
                f"set: {_DISK}: a recorded worker has KV groups with windows, which are not written to disk;"
                " use a record of workers with --disk-cache, which have one group"
            )
        if not hello.num_host_blocks or hello.model.state_bytes:
            raise ConfigError(
                f"set: {_DISK}: a recorded worker has no host memory for cached blocks, which pass through host memory;"
                " use a record of workers with --host-cache"
            )
        if not hello.block_bytes:
            raise ConfigError(
                f"set: {_DISK}: the record does not contain the size of a block; record the service again"
            )
        num_blocks = count_disk_blocks(self.disk_bytes, hello.block_bytes)
        if not num_blocks:
            raise ConfigError(f"set: {_DISK}: {self.disk_bytes} is too little for one block; raise it")
        return num_blocks


def change(recorded: CoreConfig, settings: Sequence[str]) -> Changed:
    """Return a configuration with settings of the form `name=value` changed.

    Raises:
        ConfigError: a name is unknown, a value is invalid, or settings conflict with each other.
    """
    values = to_settings(recorded)
    of_workers: dict[str, int] = {}
    disk_bytes: int | None = None
    for each in settings:
        name, separator, text = each.partition("=")
        name = name.strip().replace("-", "_")
        if not separator:
            raise ConfigError(f"set: {each!r} has no value; use NAME=VALUE, for example max_num_seqs=128")
        if name in _SPECULATION:
            of_workers["max_draft_tokens"] = _most_drafts(name, text.strip())
            continue
        if name == _DISK:
            disk_bytes = _disk_bytes(text.strip())
            continue
        if name not in values:
            raise ConfigError(f"set: {name!r} {_why_not(name)}{_hint(name, (*values, *_SPECULATION, _DISK))}")
        values[name] = parse_setting(SchedulerConfig, name, text.strip())
        if name in _OF_WORKERS and values[name]:
            of_workers[_OF_WORKERS[name]] = values[name]
    admission = AdmissionSettings(
        classes=recorded.classes, tenant_limits=recorded.tenant_limits, tenant_weights=recorded.tenant_weights
    )
    config = to_core_config(dataclasses.replace(SchedulerConfig(), **values), admission)
    return Changed(config, of_workers, disk_bytes)


def _disk_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"set: {_DISK}: {error}") from None


def to_settings(config: CoreConfig) -> dict[str, Any]:
    """Return scheduler settings for a core configuration; the inverse of `to_core_config`."""
    batching = config.batching
    return {
        "policy": config.policy,
        "batching": batching.mode,
        "max_batch_size": batching.max_batch_size,
        "max_wait_ms": batching.max_wait_s * 1000,
        "max_tokens_per_batch": batching.max_tokens_per_batch,
        "scheduler_delay_factor": batching.delay_factor,
        "capacity": config.capacity,
        "prefix_cache": config.prefix_cache,
        "policy_preemption": config.policy_preemption,
        "preempt_threshold": config.preempt_threshold,
        "victim_rule": config.victim_rule,
        "max_num_seqs": 0 if config.max_num_seqs >= ALL_ROWS else config.max_num_seqs,
        "max_num_batched_tokens": 0 if config.max_num_batched_tokens >= NO_BUDGET else config.max_num_batched_tokens,
        "itl_target_ms": config.itl_target_s * 1000,
        "slo_ttft_ms": config.slo_ttft_s * 1000,
        "slo_ttft_token_us": config.slo_ttft_token_s * 1e6,
        "preempt_priority_difference": config.preempt_priority_difference,
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "max_tokens_in_paged_kv_cache": config.max_tokens_in_paged_kv_cache,
        "max_queued_requests": config.max_queued_requests,
        "max_queued_tokens": config.max_queued_tokens,
        "max_plans_in_flight": config.max_plans_in_flight,
        "worker_wait_s": config.worker_wait_s,
        "session_wait_s": config.session_wait_s,
        "retention_share": config.retention_share,
        "step_deadline_s": config.step_deadline_s,
        "stall_timeout_s": config.stall_timeout_s,
        "resume_keep_s": config.resume_keep_s,
        "resume_keep_bytes": config.resume_keep_bytes,
    }


def _most_drafts(name: str, text: str) -> int:
    worker = WorkerConfig(**{name: parse_setting(WorkerConfig, name, text)})
    if name == "speculative_tokens":
        return worker.speculative_tokens
    if worker.speculation != "off":
        raise ConfigError(
            f"set: speculation={worker.speculation}: a record does not show how its drafts were proposed; give"
            " speculation=off, or speculative_tokens=N for another number of drafts"
        )
    return 0


def _why_not(name: str) -> str:
    known = {option.name for option in dataclasses.fields(SchedulerConfig)}
    return "does not change what the scheduler decides" if name in known else "is no setting of the scheduler"


def _hint(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; use one of {', '.join(sorted(known))}"
