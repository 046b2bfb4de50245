"""Runs the scheduler core process: queues, admission, block tables, one batch plan per worker and step.

Front ends connect to --frontend-address and workers to --worker-address. It needs no GPU and no torch.
"""

from quire_server.cli._config import add_config_flags
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.serve import lifeline
from shared.config import SchedulerConfig
from shared.config_sources import from_options

EXAMPLES = """
  quire scheduler --keys keys/scheduler --frontend-address tcp://0.0.0.0:5701 --worker-address tcp://0.0.0.0:5702
  quire scheduler --take-over tcp://standby:5703      make a standby lead
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags of `SchedulerConfig`."""
    add_config_flags(parser, SchedulerConfig)
    parser.add_argument(
        "--take-over",
        metavar="ADDRESS",
        default="",
        help="make the standby with this --standby-address lead, and exit when it does; other schedulers step down",
    )


def run(options: Namespace) -> int:
    """Run until SIGTERM or SIGINT."""
    config = from_options(SchedulerConfig, options)
    if options.take_over:
        from scheduler_svc.standby.take_over import take_over

        number = take_over(options.take_over, config.keys)
        print(f"{options.take_over} leads under number {number}")
        return 0
    lifeline.attach()
    from scheduler_svc.main import run as run_process

    return run_process(config)
