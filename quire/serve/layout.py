"""Which processes make up a service on one machine, and with which flags. Pure: values in, values out."""

import enum
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from quire.serve import lifeline
from shared.config import ConfigError, FrontendConfig, SchedulerConfig, WorkerConfig, to_flags

_DEFAULT_ENVIRONMENT = {
    # Here a worker shares its cores with the front end and the scheduler. OpenMP's threads by default spin at a
    # barrier, and while they spin the thread that they wait for is not run: measured with a tiny model on two busy
    # cores, 14 tokens/s against 250 with threads that sleep.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class Role(enum.Enum):
    """What a process is; the value is the command that runs it."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    FRONTEND = "frontend"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How many processes of each kind, and the settings of each kind."""

    scheduler: SchedulerConfig
    worker: WorkerConfig
    frontend: FrontendConfig
    frontends: int = 1
    workers: int = 1
    watchdog_s: float = 120.0
    """How long a process's main loop may stand still before it is killed and started again; 0: for ever."""

    def __post_init__(self) -> None:
        for name in ("frontends", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is too few; give at least 1")
        if self.frontend.tls_client_ca and self.frontend.health_port <= 0:
            raise ConfigError(
                "tls_client_ca: give --health-port too; without a certificate nobody else can ask for health"
            )
        if not (self.watchdog_s == 0 or self.watchdog_s >= 2):
            raise ConfigError(f"watchdog_s: {self.watchdog_s:g} is too short; give at least 2, or 0 for never")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to run."""

    name: str
    role: Role
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that all front ends share."""

    grpc: int
    http: int


def plan_children(config: ServeConfig, *, socket_dir: Path, ports: Ports, cores: int) -> list[ChildSpec]:
    """The processes of one service, in the order in which they are started.

    Args:
        config: what was asked for.
        socket_dir: private folder for the ZeroMQ sockets; an address that was set by hand is kept.
        ports: the ports that were reserved.
        cores: CPU cores to share among the workers that name no number of threads.
    """
    frontend_address = _address(config.scheduler, "frontend_address", socket_dir / "frontends")
    worker_address = _address(config.scheduler, "worker_address", socket_dir / "workers")
    scheduler = replace(config.scheduler, frontend_address=frontend_address, worker_address=worker_address)
    workers = [
        replace(
            config.worker,
            worker_address=worker_address,
            # The same name after a restart: an operator's drain and the metrics go by it.
            worker_id=_numbered(config.worker.worker_id or "worker-0", index),
            num_threads=config.worker.num_threads or max(1, cores // config.workers),
            device=_device(config.worker.device, index),
        )
        for index in range(config.workers)
    ]
    frontends = [
        replace(
            config.frontend,
            frontend_address=frontend_address,
            frontend_id=_numbered(config.frontend.frontend_id, index),
            grpc_port=ports.grpc,
            http_port=ports.http,
        )
        for index in range(config.frontends)
    ]
    return [
        _child("scheduler", Role.SCHEDULER, scheduler),
        *(_child(worker.worker_id, Role.WORKER, worker) for worker in workers),
        *(_child(frontend.frontend_id, Role.FRONTEND, frontend) for frontend in frontends),
    ]


def child_environment(environ: Mapping[str, str], supervisor_pid: int) -> dict[str, str]:
    """The environment of the children: the supervisor's own over our defaults, its pid, where this very Quire lies."""
    environment = {**_DEFAULT_ENVIRONMENT, **environ, lifeline.ENVIRONMENT: str(supervisor_pid)}
    root = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root not in installed:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environ.get("PYTHONPATH"))))
    return environment


def _child(name: str, role: Role, config: object) -> ChildSpec:
    # -P: a folder of the user's that happens to be called `services` or `shared` is not ours.
    return ChildSpec(name, role, (sys.executable, "-P", "-m", "quire.cli.main", role.value, *to_flags(config)))


def _address(config: SchedulerConfig, setting: str, private: Path) -> str:
    default = next(field.default for field in fields(config) if field.name == setting)
    value: str = getattr(config, setting)
    return f"ipc://{private}" if value == default else value


def _device(wanted: str, index: int) -> str:
    """The device of worker number `index`: by themselves, all would choose the first GPU.

    How many GPUs there are is for the worker to find out; here nothing may ask torch.
    """
    return f"{wanted}:{index}" if wanted in ("auto", "cuda") else wanted


def _numbered(name: str, index: int) -> str:
    return f"{name.removesuffix('-0')}-{index}"
