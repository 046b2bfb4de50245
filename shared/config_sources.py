"""Where settings come from: a flag wins over the environment, the environment over the file, the file over the default.

The file is TOML with the names of the settings, `max_num_seqs = 64`, named by `--config` or QUIRE_CONFIG. One file does
for all kinds of processes: each takes what it knows. A name that no process knows is an error, with the name that was
probably meant; so is a variable QUIRE_… that is all but the name of a setting.
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
"""Names the file where `--config` does not."""

OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "QUIRE_LOG_FORMAT", "QUIRE_CPU_KERNELS", "QUIRE_TOKEN", "QUIRE_TARGET"})
"""Variables that mean something and are no settings, however like one they are."""

_PREFIX = "QUIRE_"
_CLOSE = 0.85
"""How like a setting's name a variable must be to be taken for a misspelt one; not every QUIRE_… is a setting."""

ConfigT = TypeVar("ConfigT")
Field = dataclasses.Field[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A setting as it is in effect."""

    name: str
    value: Any
    source: str
    """The word "default", or the flag, variable or file that says so."""


class ConfigSources:
    """The flags, the environment and the file of one command."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> None:
        """
        Raises:
            ConfigError: a name that is no setting's, or a file that cannot be read.
        """
        _check_environment(environ)
        self._options = options
        self._environ = environ
        self._path = getattr(options, "config", None) or environ.get(CONFIG_VARIABLE) or ""
        self._file = _read(Path(self._path).expanduser()) if self._path else {}

    def make(self, config: type[ConfigT]) -> ConfigT:
        """A configuration.

        Raises:
            ConfigError: a value that cannot be used.
        """
        return config(**{setting.name: setting.value for setting in self.settings(config)})

    def settings(self, config: type[Any]) -> list[Setting]:
        """Every setting of a configuration with its source.

        Raises:
            ConfigError: a value that is none for its setting.
        """
        return [self._setting(option) for option in dataclasses.fields(config)]

    def _setting(self, option: Field) -> Setting:
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
    """The configuration that flags, environment and file make.

    Raises:
        ConfigError: a name or a value that cannot be used.
    """
    return ConfigSources(options, environ).make(config)


@cache
def all_settings() -> frozenset[str]:
    """The names of the settings of every process."""
    configs = (ServiceConfig, FrontendConfig, SchedulerConfig, WorkerConfig)
    return frozenset(option.name for config in configs for option in dataclasses.fields(config))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"config: {path} is no valid TOML: {error}") from None
    for name in content:
        if name not in all_settings():
            # A name written as a flag is one that is meant.
            close = difflib.get_close_matches(name.replace("-", "_"), all_settings(), n=1)
            hint = f"; did you mean {close[0]}?" if close else "; quire config lists those there are"
            raise ConfigError(f"config: {path}: there is no setting {name!r}{hint}")
    return content


def _check_environment(environ: Mapping[str, str]) -> None:
    names = [name.upper() for name in all_settings()]
    for variable in environ:
        name = variable.removeprefix(_PREFIX)
        if name == variable or name in names or variable in OTHER_VARIABLES:
            continue
        close = difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
        if close:
            raise ConfigError(f"{variable}: there is no such setting; did you mean {_PREFIX}{close[0]}?")


def _typed(value: Any, option: Field, path: str) -> Any:
    """A value of the file as its setting's type; TOML's own types are as strict as ours."""
    kind = type(option.default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"config: {path}: {option.name} = {value!r} is no {kind.__name__}")
    return value


def _parse(variable: str, text: str, option: Field) -> Any:
    choices = option.metadata["choices"]
    if choices and text not in choices:
        raise ConfigError(f"{variable}={text!r}: choose one of {', '.join(choices)}")
    try:
        if isinstance(option.default, bool):
            return {"1": True, "true": True, "0": False, "false": False}[text.lower()]
        kind: type[Any] = type(option.default)
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{variable}={text!r} is no {type(option.default).__name__}") from None
