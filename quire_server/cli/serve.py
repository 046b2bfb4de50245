"""Serves a model on this machine: starts and supervises scheduler, workers and front ends.

It prints one line `ready grpc=HOST:PORT http=HOST:PORT` on stdout when the service is ready, and stays in the
foreground. A process that dies is restarted. Ctrl-C or SIGTERM finishes running requests and stops everything; a second
Ctrl-C stops at once. Settings are also read from the environment (--max-num-seqs from QUIRE_MAX_NUM_SEQS) and from a
TOML file (--config), where the name is max_num_seqs. `quire config` prints the effective settings.
"""

import os
import sys

from quire_server.cli._config import add_config_flags
from quire_server.cli._other_servers import REMEDIES
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.serve.layout import ServeConfig
from shared.config import ConfigError, FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig
from shared.config_sources import API_KEY_VARIABLE, ConfigSources

EXAMPLES = """
  quire serve                                                  the bundled model
  quire serve ~/models/my-model --dtype bf16                   a local Hugging Face checkpoint
  quire serve --config quire.toml --max-num-seqs 128           settings from a file, one of them from a flag
  quire serve --workers 2 --frontends 2 --grpc-port 0          two workers, two front ends, any free port
  QUIRE_API_KEY=secret quire serve --port 8080                 only callers that know the key; HTTP on port 8080
"""


def configure(parser: OneLineParser) -> None:
    """Add the model, the process counts and the settings of all processes."""
    parser.remedies = REMEDIES
    parser.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    add_serve_flags(parser)
    parser.add_argument("--port", type=int, metavar="INT", help="the same as --http-port INT")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="accept only callers with this bearer token; may be repeated. Process lists show it: prefer the variable"
        f" {API_KEY_VARIABLE} (keys separated by commas) or --api-key-file",
    )
    parser.add_argument(
        "--show-sample", action="store_true", help="when ready, print a sample answer and how to call the server"
    )


def add_serve_flags(parser: OneLineParser) -> None:
    """Add the flags that describe a service on this machine."""
    add_config_flags(parser, ServiceConfig, SchedulerConfig, WorkerConfig, FrontendConfig)


def serve_config(options: Namespace) -> ServeConfig:
    """Return the service described by flags, environment and file.

    Raises:
        ConfigError: a value is invalid.
    """
    sources = ConfigSources(options)
    service = sources.make(ServiceConfig)
    return ServeConfig(
        scheduler=sources.make(SchedulerConfig),
        worker=sources.make(WorkerConfig),
        frontend=sources.make(FrontendConfig),
        frontends=service.frontends,
        workers=service.workers,
        standby=service.standby,
        watchdog_s=service.watchdog_s,
    )


def run(options: Namespace) -> int:
    """Serve until a signal ends it."""
    if options.served is not None:
        if options.model is not None:
            raise ConfigError(f"model: given twice, as {options.served!r} and with --model; use one")
        options.model = options.served
    if options.port is not None:
        if options.http_port is not None:
            raise ConfigError(
                f"http_port: given twice, as --port {options.port} and --http-port {options.http_port}; use one"
                " (--grpc-port is the other port)"
            )
        options.http_port = options.port
    if options.api_key:
        # The front ends inherit the variable. A flag would be visible to every user of the machine.
        given = os.environ.get(API_KEY_VARIABLE)
        os.environ[API_KEY_VARIABLE] = ",".join([*options.api_key, *([given] if given else [])])
    config = serve_config(options)
    if options.show_sample:  # Otherwise the log lines show the progress.
        print(f"starting quire: loading model {config.worker.model}", file=sys.stderr, flush=True)
    # Import late, so that neither `quire serve --help` nor the line above waits for the import.
    from quire_server.serve.foreground import serve

    return serve(config, show_sample=options.show_sample)
