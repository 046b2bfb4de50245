"""A whole service as one object: start, use, stop. `quire serve` and the benchmarks use it."""

import asyncio
import os
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from quire_server.serve.layout import Role, ServeConfig, plan_children
from quire_server.serve.ports import reserve_ports
from quire_server.serve.runtime_dir import runtime_dir
from quire_server.serve.supervisor import Addresses, ServeError, Supervisor
from shared.config import state_folder
from shared.model_path import resolve_model

_GRACE_S = 5.0
"""Shutdown time of a worker or the scheduler, seconds."""
_GRACE_MARGIN_S = 3.0
"""Shutdown time for a front end beyond its own grace period, seconds."""


def fetch_model(config: ServeConfig) -> None:
    """Make the model available on this machine before any process starts.

    A wrong name is then reported once and in one line, and a model is downloaded from the hub only once. The download
    may take long and must be interruptible by Ctrl-C, so do not call this on an event loop.

    Raises:
        ConfigError: the model does not exist or cannot be downloaded.
    """
    resolve_model(config.frontend.model, weights=config.worker.load_format != "random")


class Service:
    """Scheduler, workers and front ends on this machine; leaving `async with` stops them."""

    def __init__(self, config: ServeConfig, *, log_level: str = "debug") -> None:
        """Reserve ports and sockets.

        Args:
            config: the service.
            log_level: lowest level of the children's log lines to forward.

        Raises:
            ConfigError: a port is in use.
        """
        self._config = config
        self._held = ExitStack()
        try:
            self._ports = reserve_ports(
                self._held,
                config.frontend.host,
                grpc_port=config.frontend.grpc_port,
                http_port=config.frontend.http_port,
            )
            socket_dir = self._held.enter_context(runtime_dir())
        except BaseException:
            self._held.close()
            raise
        specs = plan_children(
            config,
            socket_dir=socket_dir,
            record_dir=state_folder() / "record",
            ports=self._ports,
            cores=len(os.sched_getaffinity(0)),
        )
        grace_s = dict.fromkeys(Role, _GRACE_S)
        grace_s[Role.FRONTEND] = config.frontend.grace_period_s + _GRACE_MARGIN_S
        self._supervisor = Supervisor(
            specs, grace_s=grace_s, pulse_dir=socket_dir, watchdog_s=config.watchdog_s, log_level=log_level
        )

    async def start(self) -> Addresses:
        """Start every process and wait until the service is ready.

        Raises:
            ServeError: a process cannot start; the message names it and the reason.
        """
        await self.launch()
        return await self.ready()

    async def launch(self) -> None:
        """Start every process; return when they have begun to load."""
        self._supervisor.start()
        await asyncio.sleep(0)  # Yield, so that the supervisor's tasks start the processes now.

    async def ready(self) -> Addresses:
        """Wait until the service is ready.

        Raises:
            ServeError: a process cannot start; the message names it and the reason.
        """
        starting = asyncio.ensure_future(self._until_ready())
        try:
            ends: set[asyncio.Future[Any]] = {starting, self._supervisor.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._supervisor.failed.done():
                raise ServeError(self._supervisor.failed.result())
            return await starting
        finally:
            starting.cancel()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time so far of every process, seconds, by name."""
        return self._supervisor.cpu_seconds()

    async def stop(self) -> None:
        """Stop every process in order, and release ports and sockets."""
        try:
            await self._supervisor.stop()
        finally:
            self._held.close()

    def kill(self) -> None:
        """Kill every process; `stop` then only cleans up."""
        self._supervisor.kill()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _probes(self, addresses: Addresses) -> str:
        frontend = self._config.frontend
        if frontend.health_port > 0:
            return f"http://{addresses.http.rpartition(':')[0]}:{frontend.health_port}"
        return f"{'https' if frontend.tls_cert else 'http'}://{addresses.http}"

    async def _until_ready(self) -> Addresses:
        addresses = await self._supervisor.listening()
        from quire_server.serve.readiness import until_ready  # This imports ssl and http, after the processes start.

        await until_ready(self._probes(addresses), workers=self._config.workers, frontends=self._config.frontends)
        self._supervisor.was_ready = True
        return addresses
