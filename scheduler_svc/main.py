"""Scheduler process: from a configuration to an exit code."""

import os
import signal
import socket as names
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
from scheduler_svc.standby.election import Election
from scheduler_svc.standby.guard import GuardProcess
from scheduler_svc.standby.leader_number import NumberFile, ReplacedError
from scheduler_svc.standby.stores import is_remote, open_store
from scheduler_svc.standby.waiting import NO_PREDECESSOR, Standby, Succession
from shared.config import ConfigError, SchedulerConfig
from shared.curve import SCHEDULER, STANDBY_DOMAIN, AllowList, check_bind, load_keys
from shared.ids import draw_incarnation
from shared.logging import configure_logging, get_logger
from shared.pulse import Pulse
from shared.telemetry import Telemetry

SWITCH_S = 0.001
"""Time after which another thread passes Python's interpreter lock to the loop, seconds.

Every socket operation of the loop releases the lock. With Python's default of 5 ms, a turn would wait 5 ms several
times while the flight recorder's thread runs.
"""


def run(config: SchedulerConfig) -> int:
    """Run the scheduler until SIGTERM or SIGINT; return the exit code.

    With a lease file, the scheduler is a standby until it holds the lease. With `standby_of`, it is a standby until it
    acquires the lease in a store or, without a lease, until an operator commands it to lead, and again after another
    scheduler has taken over. A standby listens only on its `standby_address`, and writes only its journal.
    """
    configure_logging("quire-scheduler")
    lease: LeaderLease | None = None
    election: Election | None = None
    guard: GuardProcess | None = None
    try:
        telemetry = Telemetry("quire-scheduler")
        admission = load_admission(config.admission_file)
        to_core_config(config, admission)
        check_leadership(config)
        numbers = NumberFile(Path(config.journal)) if config.standby_address or config.standby_of else None
        # Before this process waits as a standby, because it must lead at once later.
        tune_collector()
        if config.leader_lease and not is_remote(config.leader_lease):
            lease = LeaderLease(Path(config.leader_lease), f"{config.frontend_address} {config.worker_address}")
        pulse, holder = Pulse(), f"{names.gethostname()}-{os.getpid()}"
        if is_remote(config.leader_lease):
            open_store(config.leader_lease, holder, config.leader_lease_s)
            guard = GuardProcess(config.leader_lease, holder, config.leader_lease_s)
        while True:
            election = _election(config, holder, guard)
            succession = _await_leadership(config, numbers, lease, election, pulse)
            if succession is None:
                return 0
            successor = _lead(config, telemetry, admission, succession, lease, election, pulse)
            if numbers is not None and successor:
                numbers.write(numbers.read().seen(successor))
            if not successor or not config.standby_of:
                return 0
            if election is not None:
                election.end()
                election = None
    except (ConfigError, InvalidLimitsError, ReplacedError, zmq.ZMQError) as error:
        print(f"quire scheduler: {error}", file=sys.stderr)
        return 1
    finally:
        # Last, because a standby leads as soon as the lease ends.
        if election is not None:
            election.end()
        if guard is not None:
            guard.close()


def _election(config: SchedulerConfig, holder: str, guard: GuardProcess | None) -> Election | None:
    """Return the lease in etcd or Kubernetes that is configured, if any."""
    if guard is None:
        return None
    store = open_store(config.leader_lease, holder, config.leader_lease_s)
    return Election(store, config.leader_lease_s, guard)


def check_leadership(config: SchedulerConfig) -> None:
    """Check that the settings of standbys and leases fit together.

    Raises:
        ConfigError: there is no journal, or the lease is of the wrong kind.
    """
    setting = "standby_address" if config.standby_address else "standby_of" if config.standby_of else ""
    flag = f"{setting} (--{setting.replace('_', '-')})"
    if is_remote(config.leader_lease):
        if not (config.standby_address and config.standby_of):
            missing = "--standby-of" if config.standby_address else "--standby-address"
            raise ConfigError(
                "leader_lease (--leader-lease): a lease in etcd or Kubernetes is for schedulers that replicate their"
                f" journal; add {missing}"
            )
    elif config.leader_lease and setting:
        raise ConfigError(
            f"{flag}: cannot be combined with --leader-lease FILE, which is for schedulers on one machine; remove one"
            " of them"
        )
    if setting and not config.journal:
        raise ConfigError(f"{flag}: standbys need a journal; add --journal FOLDER")


def _await_leadership(
    config: SchedulerConfig,
    numbers: NumberFile | None,
    lease: LeaderLease | None,
    election: Election | None,
    pulse: Pulse,
) -> Succession | None:
    """Wait until this scheduler must lead; return None if it must exit before that."""
    if numbers is None:
        if lease is not None:
            with _on_signals(lease.cancel):
                if not lease.acquire():
                    return None
        return NO_PREDECESSOR
    known = numbers.read()
    if not config.standby_of:
        number = known.to_start(time.time_ns() // 1_000_000)
        numbers.write(known.led(number))
        return Succession(number)
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
        election=election,
        protect_server=protector(keys, SCHEDULER),
        protect_client=(lambda _socket: None) if keys is None else keys.protect_scheduler,
    )
    try:
        with _on_signals(standby.stop):
            succession = standby.run(pulse)
    finally:
        standby.close()
        if allowed is not None:
            allowed.close()
        context.term()
    if succession is None:
        numbers.write(standby.numbers)
        return None
    numbers.write(standby.numbers.led(succession.number))
    return succession


def _lead(
    config: SchedulerConfig,
    telemetry: Telemetry,
    admission: AdmissionSettings,
    succession: Succession,
    lease: LeaderLease | None,
    election: Election | None,
    pulse: Pulse,
) -> int:
    """Serve until a signal or until another scheduler leads; return the leader number of the latter, or 0."""
    incarnation = draw_incarnation()
    recorder = open_recorder(config, to_core_config(config, admission), incarnation)
    service = SchedulerService(config, telemetry, incarnation, admission, recorder, lease, succession, election, pulse)
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: service.stop())
    sys.setswitchinterval(SWITCH_S)
    get_logger().info(
        "scheduler is up",
        frontends=config.frontend_address,
        workers=config.worker_address,
        leader_number=succession.number,
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
