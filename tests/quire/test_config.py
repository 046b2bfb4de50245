"""Settings: what cannot be used is refused when a configuration is made, in a line that names setting and remedy."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shared.config import (
    ConfigError,
    FrontendConfig,
    SchedulerConfig,
    ServiceConfig,
    WorkerConfig,
    add_options,
    parse_bytes,
    to_flags,
)
from shared.config_sources import OTHER_VARIABLES, ConfigSources, from_options

CONFIGS = (ServiceConfig, SchedulerConfig, WorkerConfig, FrontendConfig)
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


def test_a_file_wins_over_defaults_only(tmp_path: Path) -> None:
    """The file sets values that no flag and no variable sets; fractions accept whole numbers."""
    path = tmp_path / "quire.toml"
    path.write_text('policy = "edf"\nmax_num_seqs = 5\nworker_wait_s = 3\nhttp_port = 80\nworkers = 2\n')
    parser = argparse.ArgumentParser()
    add_options(parser, SchedulerConfig)
    options = parser.parse_args(["--policy=lpm"])
    sources = ConfigSources(options, {"QUIRE_CONFIG": str(path), "QUIRE_MAX_NUM_SEQS": "7"})
    config = sources.make(SchedulerConfig)
    told = {setting.name: setting.source for setting in sources.settings(SchedulerConfig)}

    assert (config.policy, config.max_num_seqs, config.worker_wait_s, config.batching) == ("lpm", 7, 3.0, "continuous")
    assert [told[name] for name in ("policy", "max_num_seqs", "worker_wait_s", "batching")] == [
        "--policy",
        "QUIRE_MAX_NUM_SEQS",
        str(path),
        "default",
    ]
    assert sources.make(FrontendConfig).http_port == 80
    assert sources.make(ServiceConfig).workers == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("max_num_seq = 5", "did you mean max_num_seqs"),
        ("max-num-seqs = 5", "did you mean max_num_seqs"),
        ("colour = 5", "quire config"),
        ('max_num_seqs = "5"', "is not of type int"),
        ("max_num_seqs = -1", "at least 0"),
        ("policy = 'lifo'", "use one of balanced, fcfs"),
        ("[scheduler]", "unknown setting 'scheduler'"),
        ("policy", "not valid TOML"),
    ],
)
def test_an_invalid_setting_in_the_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    """Names, types and values are checked, and the message names the remedy."""
    path = tmp_path / "quire.toml"
    path.write_text(content + "\n")

    with pytest.raises(ConfigError, match=complaint):
        from_options(SchedulerConfig, argparse.Namespace(config=str(path)), {})


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell expands a tilde in a file, a variable or `--flag=~/…`. Other settings keep theirs."""
    monkeypatch.setenv("HOME", "/home/me")
    file = tmp_path / "quire.toml"
    file.write_text('journal = "~/journal"\nworker_address = "ipc://~/workers"\n')
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    add_options(parser, SchedulerConfig)

    config = from_options(
        SchedulerConfig,
        parser.parse_args([f"--config={file}", "--leader-lease=~/lease"]),
        {"QUIRE_RECORD_DIR": "~/record"},
    )

    assert (config.leader_lease, config.record_dir) == ("/home/me/lease", "/home/me/record")
    assert (config.journal, config.worker_address) == ("/home/me/journal", "ipc://~/workers")


def test_misspelt_variables_are_errors() -> None:
    """A variable that is almost a setting's name is an error; other variables with the prefix are ignored."""
    with pytest.raises(ConfigError, match="did you mean QUIRE_MAX_NUM_SEQS"):
        from_options(SchedulerConfig, argparse.Namespace(), {"QUIRE_MAX_NUM_SEQ": "5"})
    from_options(SchedulerConfig, argparse.Namespace(), {"QUIRE_TEST_RUN": "5", "QUIRE_HOME": "x"})


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
def test_an_invalid_size_is_refused(text: str) -> None:
    """Negative and infinite sizes are refused, too."""
    with pytest.raises(ConfigError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("variable", sorted(OTHER_VARIABLES))
def test_variables_that_are_no_settings_are_not_taken_for_misspelt_ones(variable: str) -> None:
    """QUIRE_LOG_FORMAT is not meant to be QUIRE_LOAD_FORMAT."""
    from_options(SchedulerConfig, argparse.Namespace(), {variable: "json"} if variable != "QUIRE_CONFIG" else {})
