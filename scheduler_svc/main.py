"""Scheduler process: from a configuration to an exit code."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from scheduler_svc.admission_file import AdmissionSettings, load_admission
from scheduler_svc.assembly import open_recorder, protector, to_core_config
from scheduler_svc.collector import tune_collector
from scheduler_svc.core.interface.errors import InvalidLimitsError
from scheduler_svc.leader_lease import LeaderLease
from scheduler_svc.service import SchedulerService
from scheduler_svc.standby.leader_number import NumberFile, ReplacedError
from scheduler_svc.standby.waiting import Standby
from shared.config import ConfigError, SchedulerConfig
from shared.curve import SCHEDULER, STANDBY_DOMAIN, AllowList, check_bind, load_keys
from shared.ids import draw_incarnation
from shared.logging import configure_logging, get_logger
from shared.telemetry import Telemetry

SWITCH_S = 0.001
"""Time after which another thread passes Python's interpreter lock to the loop, seconds.

Every socket operation of the loop releases the lock. With Python's default of 5 ms, a turn would wait 5 ms several
times while the flight recorder's thread runs.
"""


def run(config: SchedulerConfig) -> int:
    """Run the scheduler until SIGTERM or SIGINT; return the exit code.

    With a leader lease, the scheduler is a standby until it holds the lease. With `standby_of`, it is a standby until
    an operator commands it to lead, and again after another scheduler has taken over. A standby listens only on its
    `standby_address`, and writes only its journal.
    """
    configure_logging("quire-scheduler")
    lease: LeaderLease | None = None
    try:
        telemetry = Telemetry("quire-scheduler")
        admission = load_admission(config.admission_file)
        to_core_config(config, admission)
        numbers = _number_file(config)
        # Before this process waits as a standby, because it must lead at once later.
        tune_collector()
        if config.leader_lease:
            lease = LeaderLease(Path(config.leader_lease), f"{config.frontend_address} {config.worker_address}")
        while True:
            number = _await_leadership(config, numbers, lease)
            if number is None:
                return 0
            successor = _lead(config, telemetry, admission, number, lease)
            if numbers is not None and successor:
                numbers.write(numbers.read().seen(successor))
            if not successor or not config.standby_of:
                return 0
    except (ConfigError, InvalidLimitsError, ReplacedError, zmq.ZMQError) as error:
        print(f"quire scheduler: {error}", file=sys.stderr)
        return 1


def _number_file(config: SchedulerConfig) -> NumberFile | None:
    """Return the file with the leader numbers; None without standbys on other machines.

    Raises:
        ConfigError: there is no journal, or a lease on one machine is configured too.
    """
    setting = "standby_address" if config.standby_address else "standby_of" if config.standby_of else ""
    if not setting:
        return None
    if config.leader_lease:
        raise ConfigError(
            f"{setting} (--{setting.replace('_', '-')}): cannot be combined with --leader-lease FILE, which is for"
            " schedulers on one machine; remove one of them"
        )
    if not config.journal:
        raise ConfigError(f"{setting} (--{setting.replace('_', '-')}): standbys need a journal; add --journal FOLDER")
    return NumberFile(Path(config.journal))


def _await_leadership(config: SchedulerConfig, numbers: NumberFile | None, lease: LeaderLease | None) -> int | None:
    """Wait until this scheduler must lead; return its leader number, or None if it must exit before that."""
    if numbers is None:
        if lease is not None:
            with _on_signals(lease.cancel):
                if not lease.acquire():
                    return None
        return 0
    known = numbers.read()
    if not config.standby_of:
        number = known.to_start(time.time_ns() // 1_000_000)
        numbers.write(known.led(number))
        return number
    keys = load_keys(config.keys, SCHEDULER)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    allowed = None
    if config.standby_address:
        check_bind("standby_address", config.standby_address, protected=keys is not None, insecure=config.insecure)
        if keys is not None:
            allowed = AllowList(context, keys, (STANDBY_DOMAIN,))
    standby = Standby(
        context,
        config,
        known,
        protect_server=protector(keys, SCHEDULER),
        protect_client=(lambda _socket: None) if keys is None else keys.protect_scheduler,
    )
    try:
        with _on_signals(standby.stop):
            succession = standby.run()
    finally:
        standby.close()
        if allowed is not None:
            allowed.close()
        context.term()
    if succession is None:
        numbers.write(standby.numbers)
        return None
    numbers.write(standby.numbers.led(succession.number))
    return succession.number


def _lead(
    config: SchedulerConfig,
    telemetry: Telemetry,
    admission: AdmissionSettings,
    number: int,
    lease: LeaderLease | None,
) -> int:
    """Serve until a signal or until another scheduler leads; return the leader number of the latter, or 0."""
    incarnation = draw_incarnation()
    recorder = open_recorder(config, to_core_config(config, admission), incarnation)
    service = SchedulerService(config, telemetry, incarnation, admission, recorder, lease, number)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: service.stop())
    sys.setswitchinterval(SWITCH_S)
    get_logger().info(
        "scheduler is up", frontends=config.frontend_address, workers=config.worker_address, leader_number=number
    )
    try:
        service.run()
    finally:
        families = service.metric_families()
        service.close()
        if not service.successor:
            telemetry.shutdown(families)
            if lease is not None:
                lease.release()
    return service.successor


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at SIGTERM and SIGINT."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
