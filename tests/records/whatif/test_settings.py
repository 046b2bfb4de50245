"""Settings of a what-if replay: names and values of the scheduler's flags, with their errors."""

import dataclasses

import pytest

from records.whatif.settings import change, to_settings
from scheduler_svc.admission_file import NO_SETTINGS
from scheduler_svc.assembly import to_core_config
from scheduler_svc.core.interface.config import CoreConfig, RequestClass
from shared.config import ConfigError, SchedulerConfig

RECORDED = to_core_config(SchedulerConfig(), NO_SETTINGS)


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(),
        SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=70, policy="edf", batching="dynamic", max_wait_ms=12.5),
        SchedulerConfig(itl_target_ms=40.0, capacity="guaranteed_no_evict", prefix_cache="radix", resume_keep_s=1.0),
    ],
)
def test_a_configuration_without_changes_stays_as_it_is(config: SchedulerConfig) -> None:
    """The settings of a record's configuration give the same configuration again."""
    recorded = dataclasses.replace(
        to_core_config(config, NO_SETTINGS), classes={"x": RequestClass(policy="edf", weight=2.0)}
    )

    assert change(recorded, []).config == recorded


def test_every_field_of_the_core_can_be_set() -> None:
    """Every field in the core's configuration is a setting, except those in the admission file."""
    of_file = {"classes", "tenant_limits", "tenant_weights"}
    # These metrics differ in name or unit.
    renamed = {
        "batching": "batching",
        "itl_target_s": "itl_target_ms",
        "slo_ttft_s": "slo_ttft_ms",
        "slo_ttft_token_s": "slo_ttft_token_us",
    }
    fields = {renamed.get(each.name, each.name) for each in dataclasses.fields(CoreConfig)} - of_file

    assert fields <= to_settings(RECORDED).keys()


def test_a_limit_that_workers_have_as_well_is_changed_for_both() -> None:
    """`max_num_seqs` and `max_num_batched_tokens` are also limits in a worker's hello."""
    changed = change(RECORDED, ["max-num-seqs=128", "max_num_batched_tokens=1024", "policy=sjf"])

    assert (changed.config.max_num_seqs, changed.config.max_num_batched_tokens) == (128, 1024)
    assert changed.config.policy == "sjf"
    assert changed.of_workers == {"max_rows": 128, "max_tokens_per_step": 1024}


@pytest.mark.parametrize(("setting", "most"), [("speculation=off", 0), ("speculative_tokens=3", 3)])
def test_the_drafts_of_workers_can_be_set(setting: str, most: int) -> None:
    """The number of drafts is a worker setting only; the core's configuration is unchanged."""
    changed = change(RECORDED, [setting])

    assert changed.config == RECORDED
    assert changed.of_workers == {"max_draft_tokens": most}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_num_seq=5", "did you mean max_num_seqs"),
        ("polici=sjf", "did you mean policy"),
        ("record_dir=/tmp", "does not change what the scheduler decides"),
        ("policy=best", "unknown value 'best'; use one of balanced, fcfs, priority"),
        ("max_num_seqs=many", "'many' is not of type int"),
        ("max_num_seqs=-1", "too small"),
        ("speculation=draft", "give speculation=off, or speculative_tokens=N"),
        ("speculative_tokens=0", "too small"),
        ("max_num_seqs", "use NAME=VALUE"),
        ("disk_cache_bytes=much", "disk_cache_bytes: 'much' is not a size in bytes; use for example"),
        ("max_plans_in_flight=3", "too large; use at most 2"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_remedy(setting: str, message: str) -> None:
    """Unknown names, values of another type, and values out of range have the same errors as flags."""
    with pytest.raises(ConfigError, match=message):
        change(RECORDED, [setting])
