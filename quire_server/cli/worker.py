"""Runs one worker process: the model, its KV cache and the sampler.

It connects to the scheduler at --worker-address, which may start later. Run one worker per GPU. With
--tensor-parallel-size N, N ranks share the model and serve as one worker. This process starts the others, unless
torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) say that it is one of them. It requires the wheel's
extra `worker`: pip install "$(ls dist/quire_server-*.whl)[worker]".
"""

import gc
import os
import sys
from typing import NoReturn

from quire_server.cli._config import add_config_flags
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.serve import lifeline
from quire_server.serve.ranks import start_followers
from shared.config import WorkerConfig
from shared.config_sources import from_options

EXAMPLES = """
  quire worker --keys keys/worker --worker-address tcp://scheduler:5702 --worker-id gpu-0 --model /models/my-model
  quire worker --tensor-parallel-size 4 --model /models/large
  torchrun --nproc-per-node 4 -m quire_server.entry worker --tensor-parallel-size 4 --model /models/large
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags of `WorkerConfig`."""
    add_config_flags(parser, WorkerConfig)


def run(options: Namespace) -> int:
    """Run until SIGTERM or SIGINT."""
    config = from_options(WorkerConfig, options)
    lifeline.attach()
    clean_up = start_followers(config)
    # Importing torch creates a million objects and hardly any garbage. Garbage collection would take a tenth of the
    # import time.
    gc.disable()
    from worker_svc.main import run as run_process

    gc.freeze()
    gc.enable()

    def end(exit_code: int) -> NoReturn:
        """Exit this process after everything that needs a clean shutdown has ended.

        Python's own shutdown, which unloads thousands of modules of torch, would take seconds and delay the service.
        """
        clean_up()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    end(run_process(config, end))
