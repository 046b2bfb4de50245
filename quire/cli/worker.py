"""Runs one worker process: the model, its KV pages, the sampler.

It connects to the scheduler at --worker-address, now or as soon as one is there. One worker per GPU. Needs
the extra `worker`: pip install 'quire[worker]'.
"""

import os
import sys

from quire.cli._config import add_config_flags
from quire.cli._parser import Namespace, OneLineParser
from quire.serve import lifeline
from shared.config import WorkerConfig
from shared.config_sources import from_options

EXAMPLES = """
  quire worker --keys keys/worker --worker-address tcp://scheduler:5702 --worker-id gpu-0 --model /models/my-model
"""


def configure(parser: OneLineParser) -> None:
    """Adds the flags of `WorkerConfig`."""
    add_config_flags(parser, WorkerConfig)


def run(options: Namespace) -> int:
    """Runs until SIGTERM or SIGINT."""
    config = from_options(WorkerConfig, options)
    lifeline.attach()
    from worker_svc.main import run as run_process

    exit_code = run_process(config)
    # All that has to be ended has been ended. What Python would still do, taking thousands of modules of torch
    # apart, takes seconds, in which nothing else of the service may go on.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
