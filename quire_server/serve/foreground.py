"""Runs a service in the foreground: prints the line `ready …` when it serves, and stops it at a signal.

The service's processes are started before the supervisor imports anything for its own use, because their imports take
most of the time until the service is ready.
"""

import asyncio
import os
import signal

from quire_server.serve.layout import ServeConfig
from quire_server.serve.service import Service, fetch_model
from shared.config_sources import API_KEY_VARIABLE


def serve(config: ServeConfig, *, show_sample: bool) -> int:
    """Serve until a signal arrives; return the exit code.

    Args:
        config: the service.
        show_sample: when ready, print a sample answer and how to call the server.

    Raises:
        ConfigError: the model does not exist, or a port is in use.
        ServeError: a process cannot start.
    """
    fetch_model(config)
    return asyncio.run(_serve(config, show_sample=show_sample))


class _Signals:
    """Handler of SIGINT, SIGTERM and SIGHUP: the first one stops the service in order, a second Ctrl-C at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.killed = False
        self._service: Service | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    def attach(self, service: Service) -> None:
        """Set the service that a second Ctrl-C kills."""
        self._service = service

    def _handle(self, number: signal.Signals) -> None:
        if self.first.is_set() and number == signal.SIGINT and self._service is not None:
            self.killed = True
            self._service.kill()
        self.first.set()


async def _serve(config: ServeConfig, *, show_sample: bool) -> int:
    signals = _Signals()
    # Suppress log lines, because they would interrupt the sample's text.
    service = Service(config, log_level="warning" if show_sample else "debug")
    signals.attach(service)
    async with service:
        serving = asyncio.create_task(_serve_until_signal(service, show_sample=show_sample))
        signalled = asyncio.create_task(signals.first.wait())
        await asyncio.wait({serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if serving.done():
            await serving  # Raise the error that prevented the start.
        serving.cancel()
    return 130 if signals.killed else 0


async def _serve_until_signal(service: Service, *, show_sample: bool) -> None:
    await service.launch()
    from shared.logging import configure_logging

    configure_logging("quire-supervisor")
    addresses = await service.ready()
    print(f"ready grpc={addresses.grpc} http={addresses.http}", flush=True)
    if show_sample:
        from quire_server.serve.sample import show_sample as show  # Only a sample needs grpc.

        await show(addresses, os.environ.get(API_KEY_VARIABLE, "").partition(",")[0])
    await asyncio.Event().wait()
