"""Runs one front-end process: gRPC and HTTP for clients, tokenisation, streams.

It connects to the scheduler core at --frontend-address, which may start later. Several front ends may share one gRPC
port on one machine. It prints `listening grpc=HOST:PORT http=HOST:PORT` when it listens. On SIGTERM it finishes running
requests.
"""

from quire_server.cli._config import add_config_flags
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.serve import lifeline
from shared.config import FrontendConfig
from shared.config_sources import from_options

EXAMPLES = """
  quire frontend --frontend-address tcp://scheduler:5701 --keys keys/frontend --model /models/my-model
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags of `FrontendConfig`."""
    add_config_flags(parser, FrontendConfig)


def run(options: Namespace) -> int:
    """Run until SIGTERM or SIGINT."""
    config = from_options(FrontendConfig, options)
    lifeline.attach()
    from services.frontend import run as run_process

    return run_process(config)
