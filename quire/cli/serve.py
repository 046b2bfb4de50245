"""Serves a model on this machine: scheduler, workers and front ends, started and watched by one command.

It prints one line `ready grpc=HOST:PORT http=HOST:PORT` on stdout when the service can be used, and stays in
the foreground. A process that dies is started again. Ctrl-C or SIGTERM lets running requests end and stops
everything; a second Ctrl-C does so at once. Settings are also read from the environment, --max-num-seqs from
QUIRE_MAX_NUM_SEQS, and from a TOML file (--config), where it is max_num_seqs; `quire config` shows what is in effect.
"""

import asyncio
import signal
from typing import TYPE_CHECKING

from quire.cli._config import add_config_flags
from quire.cli._parser import Namespace, OneLineParser
from quire.serve.layout import ServeConfig
from shared.config import FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from shared.config_sources import ConfigSources
from shared.logging import configure_logging

if TYPE_CHECKING:
    from quire.serve.service import Service

EXAMPLES = """
  quire serve                                                  the embedded model
  quire serve --model ~/models/my-model --dtype bf16           a local Hugging Face checkpoint
  quire serve --config quire.toml --max-num-seqs 128           settings from a file, one of them from a flag
  quire serve --workers 2 --frontends 2 --grpc-port 0          two workers, two front ends, any free port
"""


def configure(parser: OneLineParser) -> None:
    """Adds the numbers of processes and the flags of all three kinds."""
    add_serve_flags(parser)
    parser.add_argument(
        "--show-sample", action="store_true", help="when ready, show one answer and how to call the server"
    )


def add_serve_flags(parser: OneLineParser) -> None:
    """Adds what decides how a service on this machine looks."""
    add_config_flags(parser, ServiceConfig, FrontendConfig, SchedulerConfig, WorkerConfig)


def serve_config(options: Namespace) -> ServeConfig:
    """The service that flags, environment and file describe.

    Raises:
        ConfigError: a value that cannot be used.
    """
    sources = ConfigSources(options)
    service = sources.make(ServiceConfig)
    return ServeConfig(
        scheduler=sources.make(SchedulerConfig),
        worker=sources.make(WorkerConfig),
        frontend=sources.make(FrontendConfig),
        frontends=service.frontends,
        workers=service.workers,
        watchdog_s=service.watchdog_s,
    )


def run(options: Namespace) -> int:
    """Serves until a signal ends it."""
    # Imported late, here and below: `quire serve --help` needs no grpc.
    from quire.serve.service import fetch_model

    config = serve_config(options)
    configure_logging("quire-supervisor")
    fetch_model(config)
    return asyncio.run(_serve(config, show_sample=options.show_sample))


class _Signals:
    """SIGINT, SIGTERM and SIGHUP: the first one asks for an orderly end, a second Ctrl-C for an immediate
    one."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.killed = False
        self._service: Service | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._handle, number)

    def attach(self, service: "Service") -> None:
        """Names the service that a second Ctrl-C kills."""
        self._service = service

    def _handle(self, number: signal.Signals) -> None:
        if self.first.is_set() and number == signal.SIGINT and self._service is not None:
            self.killed = True
            self._service.kill()
        self.first.set()


async def _serve(config: ServeConfig, *, show_sample: bool) -> int:
    from quire.serve.service import Service

    signals = _Signals()
    # Between the words of the sample, log lines are in the way.
    service = Service(config, log_level="warning" if show_sample else "debug")
    signals.attach(service)
    async with service:
        serving = asyncio.create_task(_until_told(service, show_sample=show_sample))
        told = asyncio.create_task(signals.first.wait())
        await asyncio.wait({serving, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if serving.done():
            await serving  # raises why it could not start
        serving.cancel()
    return 130 if signals.killed else 0


async def _until_told(service: "Service", *, show_sample: bool) -> None:
    addresses = await service.start()
    print(f"ready grpc={addresses.grpc} http={addresses.http}", flush=True)
    if show_sample:
        from quire.serve.sample import show_sample as show

        await show(addresses)
    await asyncio.Event().wait()
