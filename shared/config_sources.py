"""Sources of settings. The precedence is: flag, environment variable, file, default.

The file is TOML with setting names, for example `max_num_seqs = 64`; `--config` or QUIRE_CONFIG specifies its path. One
file serves all kinds of processes, and each process reads its own settings. An unknown name in the file is an error
that suggests the closest setting. So is a variable QUIRE_… that is almost a setting's name.
"""

import argparse
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from shared.config import ConfigError, FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig

CONFIG_VARIABLE = "QUIRE_CONFIG"
"""Variable that names the file if `--config` does not."""

API_KEY_VARIABLE = "QUIRE_API_KEY"
"""Variable with the API keys that a front end accepts, separated by commas. A flag would be visible in process lists.
"""

OTHER_VARIABLES = frozenset(
    {CONFIG_VARIABLE, API_KEY_VARIABLE, "QUIRE_LOG_FORMAT", "QUIRE_CPU_KERNELS", "QUIRE_TOKEN", "QUIRE_TARGET"}
    | {"QUIRE_TLS_CA"}
)
"""Environment variables that Quire reads but that are not settings."""

_PREFIX = "QUIRE_"
_CLOSE = 0.85
"""Minimum similarity for an unknown variable to count as a misspelt setting, because other QUIRE_… names exist."""

ConfigT = TypeVar("ConfigT")
Field = dataclasses.Field[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A setting with its effective value."""

    name: str
    value: Any
    source: str
    """"default", or the flag, variable or file that sets the value."""


class ConfigSources:
    """Settings of one command from flags, environment and file."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
        """Read the sources.

        Args:
            options: parsed flags.
            environ: environment variables.

        Raises:
            ConfigError: a name is not a setting, or the file cannot be read.
        """
        _check_environment(environ)
        self._options = options
        self._environ = environ
        self._path = getattr(options, "config", None) or environ.get(CONFIG_VARIABLE) or ""
        self._file = _read(Path(self._path).expanduser()) if self._path else {}

    def make(self, config: type[ConfigT]) -> ConfigT:
        """Return a configuration.

        Raises:
            ConfigError: a value is invalid.
        """
        return config(**{setting.name: setting.value for setting in self.settings(config)})

    def settings(self, config: type[Any]) -> list[Setting]:
        """Return every setting of a configuration with its source.

        Raises:
            ConfigError: a value has the wrong type.
        """
        return [self._setting(option) for option in dataclasses.fields(config)]

    def _setting(self, option: Field) -> Setting:
        found = self._found(option)
        is_home = option.metadata["is_path"] and found.value.startswith("~")
        return dataclasses.replace(found, value=os.path.expanduser(found.value)) if is_home else found

    def _found(self, option: Field) -> Setting:
        name = option.name
        variable = _PREFIX + name.upper()
        given = getattr(self._options, name, None)
        if given is not None:
            return Setting(name, given, "--" + name.replace("_", "-"))
        if variable in self._environ:
            return Setting(name, _parse(variable, self._environ[variable], option), variable)
        if name in self._file:
            return Setting(name, _typed(self._file[name], option, self._path), str(self._path))
        return Setting(name, option.default, "default")


def from_options(
    config: type[ConfigT], options: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> ConfigT:
    """Return the configuration from flags, environment and file.

    Raises:
        ConfigError: a name or a value is invalid.
    """
    return ConfigSources(options, environ).make(config)


def parse_setting(config: type[Any], name: str, text: str) -> Any:
    """Parse the value of one setting from a text.

    Raises:
        ConfigError: the text does not have the setting's type, or is not one of its choices.
    """
    return _parse(name, text, next(option for option in dataclasses.fields(config) if option.name == name))


@cache
def all_settings() -> frozenset[str]:
    """Return the names of all processes' settings."""
    configs = (ServiceConfig, FrontendConfig, SchedulerConfig, WorkerConfig)
    return frozenset(option.name for config in configs for option in dataclasses.fields(config))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
    for name in content:
        if name not in all_settings():
            # For suggestions, also accept flag spelling with hyphens.
            close = difflib.get_close_matches(name.replace("-", "_"), all_settings(), n=1)
            hint = f"; did you mean {close[0]}?" if close else "; quire config lists all settings"
            raise ConfigError(f"config: {path}: unknown setting {name!r}{hint}")
    return content


def _check_environment(environ: Mapping[str, str]) -> None:
    names = [name.upper() for name in all_settings()]
    for variable in environ:
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in names or variable in OTHER_VARIABLES:
            continue
        close = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
        if close:
            raise ConfigError(f"{variable}: unknown setting; did you mean {_PREFIX}{close[0]}?")


def _typed(value: Any, option: Field, path: str) -> Any:
    """Return a value from the file if it has the type of its setting. An int may be converted to a float."""
    kind = type(option.default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"config: {path}: {option.name} = {value!r} is not of type {kind.__name__}")
    return value


def _parse(variable: str, text: str, option: Field) -> Any:
    choices = option.metadata["choices"]
    if choices and text not in choices:
        raise ConfigError(f"{variable}: unknown value {text!r}; use one of {', '.join(choices)}")
    try:
        if isinstance(option.default, bool):
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        kind: type[Any] = type(option.default)
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{variable}: {text!r} is not of type {type(option.default).__name__}") from None
