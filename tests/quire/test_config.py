"""Settings: what cannot be used is refused when a configuration is made, in a line that names setting and remedy."""

import argparse
import dataclasses
from typing import Any

import pytest

from shared.config import (
    ConfigError,
    FrontendConfig,
    SchedulerConfig,
    WorkerConfig,
    add_options,
    from_options,
    parse_bytes,
    to_flags,
)

CONFIGS = (SchedulerConfig, WorkerConfig, FrontendConfig)
BOUNDED = [
    (config, option, key, step)
    for config in CONFIGS
    for option in dataclasses.fields(config)
    for key, step in (("least", -1), ("most", 1))
    if option.metadata[key] is not None
]


@pytest.mark.parametrize(("config", "option", "key", "step"), BOUNDED, ids=lambda each: getattr(each, "name", None))
def test_a_bound_is_allowed_and_what_lies_beyond_is_not(
    config: type[Any], option: "dataclasses.Field[Any]", key: str, step: int
) -> None:
    """The message names the setting and the bound."""
    kind: Any = type(option.default)
    bound = kind(option.metadata[key])
    assert getattr(config(**{option.name: bound}), option.name) == bound
    with pytest.raises(ConfigError, match=rf"{option.name} .*at (least|most) {option.metadata[key]}"):
        config(**{option.name: bound + step})


def test_nan_is_in_no_range() -> None:
    """A float that is no number would pass comparisons written the other way round."""
    with pytest.raises(ConfigError, match="worker_silence_s"):
        SchedulerConfig(worker_silence_s=float("nan"))


def test_flags_win_over_the_environment_and_the_environment_over_defaults() -> None:
    """One name per setting, in three places."""
    parser = argparse.ArgumentParser()
    add_options(parser, SchedulerConfig)
    environ = {"QUIRE_MAX_NUM_SEQS": "7", "QUIRE_POLICY": "edf"}
    config = from_options(SchedulerConfig, parser.parse_args(["--max-num-seqs", "9"]), environ)
    assert (config.max_num_seqs, config.policy, config.batching) == (9, "edf", "continuous")
    with pytest.raises(ConfigError, match="QUIRE_POLICY"):
        from_options(SchedulerConfig, parser.parse_args([]), {"QUIRE_POLICY": "lifo"})


def test_flags_of_a_configuration_make_the_same_one() -> None:
    """That is how the supervisor hands settings down."""
    config = SchedulerConfig(max_num_seqs=3, worker_wait_s=1.5, policy="lpm")
    parser = argparse.ArgumentParser()
    add_options(parser, SchedulerConfig)
    assert from_options(SchedulerConfig, parser.parse_args(to_flags(config)), {}) == config


@pytest.mark.parametrize(("text", "size"), [("512MiB", 512 << 20), ("2 GB", 2 * 10**9), ("0", 0), ("1.5KiB", 1536)])
def test_sizes(text: str, size: int) -> None:
    """Binary and decimal units."""
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "-5GiB", "many", "inf", "nan", "5XB"])
def test_what_is_no_size(text: str) -> None:
    """Negative and infinite ones included."""
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)
