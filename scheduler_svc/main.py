"""Scheduler process: from a configuration to an exit code."""

import signal
import sys
from pathlib import Path

import zmq

from scheduler_svc.admission_file import load_admission
from scheduler_svc.assembly import open_recorder, to_core_config
from scheduler_svc.collector import tune_collector
from scheduler_svc.core.interface.errors import InvalidLimitsError
from scheduler_svc.leader_lease import LeaderLease
from scheduler_svc.service import SchedulerService
from shared.config import ConfigError, SchedulerConfig
from shared.ids import draw_incarnation
from shared.logging import configure_logging, get_logger
from shared.telemetry import Telemetry


def run(config: SchedulerConfig) -> int:
    """Run the scheduler until SIGTERM or SIGINT; return the exit code.

    With a leader lease, the scheduler is a standby until it holds the lease. A standby does not listen on any address
    and does not open any folder.
    """
    configure_logging("quire-scheduler")
    lease: LeaderLease | None = None
    try:
        telemetry = Telemetry("quire-scheduler")
        admission = load_admission(config.admission_file)
        if config.leader_lease:
            lease = LeaderLease(Path(config.leader_lease), f"{config.frontend_address} {config.worker_address}")
            if not _lead(lease):
                return 0
        incarnation = draw_incarnation()
        recorder = open_recorder(config, to_core_config(config, admission), incarnation)
        service = SchedulerService(config, telemetry, incarnation, admission, recorder, lease)
    except (ConfigError, InvalidLimitsError, zmq.ZMQError) as error:
        print(f"quire scheduler: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    tune_collector()
    get_logger().info("scheduler is up", frontends=config.frontend_address, workers=config.worker_address)
    try:
        service.run()
    finally:
        families = service.metric_families()
        service.close()
        telemetry.shutdown(families)
        if lease is not None:
            lease.release()
    return 0


def _lead(lease: LeaderLease) -> bool:
    """Wait for the lease; return False if SIGTERM or SIGINT comes first."""
    before = {number: signal.signal(number, lambda *_: lease.cancel()) for number in (signal.SIGTERM, signal.SIGINT)}
    is_leader = lease.acquire()
    for number, handler in before.items():
        signal.signal(number, handler)
    return is_leader
