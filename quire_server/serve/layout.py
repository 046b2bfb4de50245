"""Lists the processes of a service on one machine, and their flags. Pure functions."""

import enum
import os
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from quire_server.serve import lifeline
from shared.config import ConfigError, FrontendConfig, SchedulerConfig, WorkerConfig, parse_bytes, to_flags

_DEFAULT_ENVIRONMENT = {
    # On one machine, the worker shares its cores with the front end and the scheduler. By default, OpenMP threads spin
    # at a barrier and thus keep the awaited thread off the core. Measured with a tiny model on two busy cores: 14
    # tokens/s with spinning threads, 250 tokens/s with sleeping threads.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class Role(enum.Enum):
    """Role of a process; the value is the command name."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    FRONTEND = "frontend"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Number of processes per role, and each role's settings."""

    scheduler: SchedulerConfig
    worker: WorkerConfig
    frontend: FrontendConfig
    frontends: int = 1
    workers: int = 1
    standby: bool = False
    """Whether a second scheduler process waits to take over."""
    watchdog_s: float = 120.0
    """Time after which a process with a hanging main loop is killed and restarted, seconds; 0 for never."""

    def __post_init__(self) -> None:
        for name in ("frontends", "workers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is too small; use at least 1")
        if self.frontend.tls_client_ca and self.frontend.health_port <= 0:
            raise ConfigError(
                "tls_client_ca: requires --health-port, because health probes have no client certificate; use a port"
            )
        if not (self.watchdog_s == 0 or self.watchdog_s >= 2):
            raise ConfigError(
                f"watchdog_s: {self.watchdog_s:g} is too small; use at least 2, or 0 to disable the watchdog"
            )


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process to run."""

    name: str
    role: Role
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports shared by all front ends."""

    grpc: int
    http: int


def plan_children(
    config: ServeConfig, *, socket_dir: Path, record_dir: Path, ports: Ports, cores: int
) -> list[ChildSpec]:
    """Return a service's processes, in start order.

    Args:
        config: the service.
        socket_dir: private folder for the ZeroMQ sockets; addresses that the user has set are not changed.
        record_dir: folder with one record per service of this user, named by gRPC port. A service with a random port
            gets a different one at each start, so its scheduler chooses the folder.
        ports: the reserved ports.
        cores: CPU cores to divide among the ranks of workers that do not set a number of threads.
    """
    frontend_address = _address(config.scheduler, "frontend_address", socket_dir / "frontends")
    worker_address = _address(config.scheduler, "worker_address", socket_dir / "workers")
    scheduler = replace(config.scheduler, frontend_address=frontend_address, worker_address=worker_address)
    if scheduler.record_dir == "auto" and config.frontend.grpc_port:
        scheduler = replace(scheduler, record_dir=str(record_dir / str(config.frontend.grpc_port)))
    if scheduler.leader_lease.partition(":")[0] in ("etcd", "kubernetes"):
        raise ConfigError(
            "leader_lease (--leader-lease): quire serve supports only a file, for a standby on this machine; remove it"
            " and add --standby, or start each scheduler with quire scheduler"
        )
    if config.standby and (scheduler.standby_address or scheduler.standby_of):
        name = "standby_address" if scheduler.standby_address else "standby_of"
        raise ConfigError(
            f"{name} (--{name.replace('_', '-')}): --standby starts a standby on this machine, which needs no address;"
            " remove one of them"
        )
    if scheduler.leader_lease and not config.standby:
        # Without a second scheduler process there is never a standby, and an alert would report that.
        raise ConfigError(
            "leader_lease (--leader-lease): quire serve starts no standby without --standby; add it, or use"
            " --leader-lease with quire scheduler only"
        )
    if config.standby:
        scheduler = replace(scheduler, leader_lease=scheduler.leader_lease or str(socket_dir / "leader"))
    if config.worker.disk_cache and not parse_bytes(config.worker.host_cache):
        raise ConfigError(
            "disk_cache (--disk-cache): blocks on disk pass through host memory, of which there is none; add"
            " --host-cache, for example --host-cache 4GiB"
        )
    ranks = config.worker.tensor_parallel_size
    workers = [
        replace(
            config.worker,
            worker_address=worker_address,
            # Keep the name across restarts, because drains and metrics refer to it.
            worker_id=_numbered(config.worker.worker_id or "worker-0", index),
            num_threads=config.worker.num_threads or max(1, cores // (config.workers * ranks)),
            device=_device(config.worker.device, index * ranks),
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
        *([_child("scheduler-1", Role.SCHEDULER, scheduler)] if config.standby else []),
        *(_child(worker.worker_id, Role.WORKER, worker) for worker in workers),
        *(_child(frontend.frontend_id, Role.FRONTEND, frontend) for frontend in frontends),
    ]


def child_environment(environ: Mapping[str, str], supervisor_pid: int) -> dict[str, str]:
    """Return the environment of the children.

    It contains the defaults, the supervisor's environment and process id, and this installation's import path.
    """
    environment = {**_DEFAULT_ENVIRONMENT, **environ, lifeline.ENVIRONMENT: str(supervisor_pid)}
    root = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root not in installed:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environ.get("PYTHONPATH"))))
    return environment


def _child(name: str, role: Role, config: object) -> ChildSpec:
    # -P prevents the import of a user's folder that happens to be named `services` or `shared`.
    return ChildSpec(name, role, (sys.executable, "-P", "-m", "quire_server.cli.main", role.value, *to_flags(config)))


def _address(config: SchedulerConfig, setting: str, private: Path) -> str:
    default = next(field.default for field in fields(config) if field.name == setting)
    value: str = getattr(config, setting)
    return f"ipc://{private}" if value == default else value


def _device(wanted: str, index: int) -> str:
    """Return the device number `index`; without a number all workers would use the first GPU.

    The worker itself finds out the number of GPUs, because the supervisor must not import torch.
    """
    return f"{wanted}:{index}" if wanted in ("auto", "cuda") else wanted


def _numbered(name: str, index: int) -> str:
    return f"{name.removesuffix('-0')}-{index}"
