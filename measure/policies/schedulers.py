"""Schedulers by specification, such as `quire:sjf` or `quire:default+itl_target_ms=50`, and the engines for them."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.policies.costs import Costs
from measure.policies.engine import Engine
from measure.policies.peer_engine import PeerEngine
from measure.policies.quire_engine import QuireEngine
from measure.policies.routers import ROUTERS
from scheduler_svc.admission_file import AdmissionSettings
from scheduler_svc.assembly import to_core_config
from scheduler_svc.core.interface.config import POLICIES, CoreConfig
from scheduler_svc.core.interface.errors import InvalidLimitsError
from shared.config import ConfigError, SchedulerConfig

_NO_LIMIT = 1 << 30
ROOT = Path(__file__).resolve().parents[2]
VLLM_PYTHON = ROOT / "build" / "arena-vllm" / "bin" / "python"
"""Interpreter of the environment that `make arena-vllm` creates."""
VLLM_POLICIES = ("fcfs", "priority")
BEST = "best"
"""Policy name that searches a peer's settings."""
_BUDGETS, _THRESHOLDS = (2048, 4096, 8192, 16_384), (0, 512, 2048)
"""Values that the search tries for vLLM's max_num_batched_tokens and long_prefill_token_threshold."""


@dataclass(frozen=True, slots=True)
class Specification:
    """A scheduler: its kind, its policy, and the settings that differ from its defaults."""

    kind: str
    policy: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return "+".join([f"{self.kind}:{self.policy}", *(f"{key}={value}" for key, value in self.settings)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Settings that all schedulers in a run share."""

    costs: Costs
    num_workers: int
    in_flight: int
    vllm_python: Path = VLLM_PYTHON
    """Interpreter of the environment with vLLM."""


def parse(text: str) -> Specification:
    """Read a specification: KIND:POLICY[+SETTING=VALUE...].

    Raises:
        ConfigError: the text is not a specification.
    """
    head, *settings = text.strip().split("+")
    kind, _, policy = head.partition(":")
    if kind not in KINDS or not policy:
        known = ", ".join(f"{each}:POLICY" for each in KINDS)
        raise ConfigError(f"--schedulers: {text!r} is not a scheduler; use {known}, for example quire:fcfs")
    pairs = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not key or not equals or not value:
            raise ConfigError(f"--schedulers: {text!r}: {setting!r} is not a setting; write +NAME=VALUE")
        pairs.append((key, value))
    return Specification(kind, policy, tuple(pairs))


def candidates(specification: Specification, *, with_priorities: bool) -> list[Specification]:
    """Return the specification itself, or all settings to try if the policy is `best`.

    Args:
        specification: the scheduler.
        with_priorities: whether the jobs have priorities or targets that the policy priority may use.
    """
    if specification.policy != BEST:
        return [specification]
    return [
        Specification(
            specification.kind,
            policy,
            (
                ("max_num_batched_tokens", str(budget)),
                *((("long_prefill_token_threshold", str(threshold)),) if threshold else ()),
                *specification.settings,
            ),
        )
        for policy in (VLLM_POLICIES if with_priorities else VLLM_POLICIES[:1])
        for budget in _BUDGETS
        for threshold in _THRESHOLDS
    ]


def quire_config(specification: Specification, setup: Setup) -> CoreConfig:
    """Return the configuration for Quire's core: the defaults of `quire serve`, plus the settings.

    Queues are unlimited, because the peers' queues are.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    name = specification.name
    fields = {field.name: field.type for field in dataclasses.fields(SchedulerConfig)}
    costs = setup.costs
    values: dict[str, object] = {
        "max_num_seqs": costs.max_num_seqs,
        "max_num_batched_tokens": costs.max_num_batched_tokens,
        "max_plans_in_flight": setup.in_flight,
        "max_queued_requests": _NO_LIMIT,
        "max_queued_tokens": 1 << 50,
    }
    if specification.policy != "default":
        if specification.policy not in POLICIES:
            raise ConfigError(f"--schedulers: {name}: unknown policy; use default, {', '.join(POLICIES)}")
        values["policy"] = specification.policy
    for key, text in specification.settings:
        read = _READERS.get(str(getattr(fields.get(key), "__name__", fields.get(key))))
        if read is None:
            raise ConfigError(f"--schedulers: {name}: {key} is not a setting of the scheduler; see quire help serve")
        try:
            values[key] = read(text)
        except ValueError:
            raise ConfigError(f"--schedulers: {name}: {key}={text} is not valid; use a number") from None
    try:
        config = dataclasses.replace(SchedulerConfig(), **values)  # type: ignore[arg-type]
        return to_core_config(config, AdmissionSettings())
    except (InvalidLimitsError, ConfigError) as error:
        raise ConfigError(f"--schedulers: {name}: {error}") from None


def check(specification: Specification, setup: Setup) -> None:
    """Check the policy and the settings of a scheduler.

    Raises:
        ConfigError: they are invalid.
    """
    if specification.kind == "quire":
        quire_config(specification, setup)
    else:
        _vllm_settings(specification)
        if not setup.vllm_python.exists():
            raise ConfigError(
                f"--vllm-python: {setup.vllm_python} does not exist; run make arena-vllm, or give the interpreter of an"
                " environment with vLLM 0.32.0"
            )


def make(specification: Specification, setup: Setup) -> Engine:
    """Return an engine.

    Raises:
        ConfigError: a setting is unknown or invalid.
    """
    return KINDS[specification.kind](specification, setup)


def _make_quire(specification: Specification, setup: Setup) -> Engine:
    return QuireEngine(quire_config(specification, setup), setup.costs, setup.num_workers)


def _vllm_settings(specification: Specification) -> tuple[str, dict[str, Any]]:
    """Return the router, and the fields of vLLM's SchedulerConfig."""
    if specification.policy not in (*VLLM_POLICIES, BEST):
        known = ", ".join((*VLLM_POLICIES, BEST))
        raise ConfigError(f"--schedulers: {specification.name}: unknown policy; use {known}")
    settings: dict[str, Any] = dict(specification.settings)
    router = settings.pop("router", "least-load")
    if router not in ROUTERS:
        raise ConfigError(f"--schedulers: {specification.name}: unknown router; use {', '.join(ROUTERS)}")
    return router, {key: _value(text) for key, text in settings.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _make_vllm(specification: Specification, setup: Setup) -> Engine:
    router, settings = _vllm_settings(specification)
    return PeerEngine(
        setup.vllm_python,
        specification.policy,
        settings,
        setup.costs,
        num_workers=setup.num_workers,
        in_flight=setup.in_flight,
        router=ROUTERS[router](setup.num_workers),
    )


_READERS: Mapping[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}
KINDS: Mapping[str, Callable[[Specification, Setup], Engine]] = {"quire": _make_quire, "vllm": _make_vllm}
"""Engine factory for each kind of scheduler."""
