"""Admission file: limits and weights of tenants, and policies of request classes, in TOML.

[tenants.acme]          # `default` applies to all tenants that are not listed
weight = 2.0            # share under the policy `fair`; default 1
max_running = 8         # 0 or absent: no limit
max_queued = 100
tokens_per_s = 500.0

[classes.interactive]   # the value of scheduling.request_class
policy = "edf"
weight = 3.0            # share among the classes; default 1
"""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scheduler_svc.core.interface.config import RequestClass, TenantLimits
from shared.config import ConfigError

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Settings of the file; `CoreConfig` documents each field."""

    tenant_limits: dict[str, TenantLimits] = field(default_factory=dict)
    tenant_weights: dict[str, float] = field(default_factory=dict)
    classes: dict[str, RequestClass] = field(default_factory=dict)


NO_SETTINGS = AdmissionSettings()


def load_admission(path: str) -> AdmissionSettings:
    """Read the file's settings; return `NO_SETTINGS` for an empty path.

    Raises:
        ConfigError: the file cannot be read, or an entry is unknown or has the wrong type.
    """
    if not path:
        return NO_SETTINGS
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"admission_file (--admission-file): {path}: {error}") from None
    try:
        return _settings(content)
    except ValueError as error:
        raise ConfigError(f"admission_file (--admission-file): {path}: {error}") from None


def _settings(content: dict[str, Any]) -> AdmissionSettings:
    settings = AdmissionSettings()
    _check_keys("file", content, {"tenants", "classes"})
    for name, table in _tables(content, "tenants"):
        _check_keys(f"tenants.{name}", table, {"weight", "max_running", "max_queued", "tokens_per_s"})
        values = {key: _number(f"tenants.{name}.{key}", value) for key, value in table.items()}
        tenant = "" if name == DEFAULT else name
        if "weight" in values:
            settings.tenant_weights[tenant] = values.pop("weight")
        settings.tenant_limits[tenant] = TenantLimits(
            max_running=_whole(f"tenants.{name}.max_running", values.get("max_running", 0)),
            max_queued=_whole(f"tenants.{name}.max_queued", values.get("max_queued", 0)),
            tokens_per_s=values.get("tokens_per_s", 0.0),
        )
    for name, table in _tables(content, "classes"):
        _check_keys(f"classes.{name}", table, {"policy", "weight"})
        if not isinstance(table.get("policy"), str):
            raise ValueError(f"classes.{name}.policy: missing; add one of the policies that --policy accepts")
        weight = _number(f"classes.{name}.weight", table.get("weight", 1.0))
        settings.classes[name] = RequestClass(policy=table["policy"], weight=weight)
    return settings


def _tables(content: dict[str, Any], section: str) -> list[tuple[str, dict[str, Any]]]:
    tables = content.get(section, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError(f"{section}: every entry must be a table; write [{section}.name]")
    return list(tables.items())


def _check_keys(where: str, table: dict[str, Any], known: set[str]) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; use one of {', '.join(sorted(known))}")


def _number(where: str, value: object) -> float:
    # A bool is an int in Python, and every comparison with NaN is False.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{where}: {value!r} is not a finite number ≥ 0; correct it")
    return value


def _whole(where: str, value: float) -> int:
    if value != int(value):
        raise ValueError(f"{where}: {value} is not an integer; correct it")
    return int(value)
