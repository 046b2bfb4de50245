"""Runs one front-end process: gRPC and HTTP for clients, tokenizing, streams.

It connects to the scheduler core at --frontend-address, now or as soon as one is there. Several front ends
may share one gRPC port on one machine. It prints `listening grpc=HOST:PORT http=HOST:PORT` when it listens;
SIGTERM lets running requests end.
"""

from quire.cli._config import add_config_flags
from quire.cli._parser import Namespace, OneLineParser
from quire.serve import lifeline
from shared.config import FrontendConfig
from shared.config_sources import from_options

EXAMPLES = """
  quire frontend --frontend-address tcp://scheduler:5701 --keys keys/frontend --model /models/my-model
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags of `FrontendConfig`."""
    add_config_flags(parser, FrontendConfig)


def run(options: Namespace) -> int:
    """Runs until SIGTERM or SIGINT."""
    config = from_options(FrontendConfig, options)
    lifeline.attach()
    from services.frontend import run as run_process

    return run_process(config)
