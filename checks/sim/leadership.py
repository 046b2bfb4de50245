"""Simulation of leases: several schedulers with clocks of their own, a store, a network with faults, and a front end.

    python -m checks.sim.leadership --seeds 200

The decisions are the real ones: `scheduler_svc.standby.tenure` and `shared.schedulers`. The store is a model with the
rules of etcd: one lease for one key, compare-and-swap of the number, revocation by the id of a lease. Faults stop and
continue processes between a check and a send, kill them in any state, cut them off from the store or the front end, and
delay every message. The clocks of the schedulers have any offset and run at different speeds.

Promises:

* number: no two tenures have the same number, and numbers increase.
* one: at no time may two schedulers send.
* fenced: the front end accepts no frame of a scheduler after a state of a scheduler with a higher number.
* stream: the tokens that the front end accepts have no gap, and none is repeated.
* guard: only the lease of a dead process is revoked by its guard.
* liveness: some scheduler leads again after all faults have ended.
"""

import argparse
import heapq
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.standby import tenure
from scheduler_svc.standby.tenure import Tenure
from shared.schedulers import Schedulers

DURATION_S = 2.0
_RENEWALS = 5
_NUM_SCHEDULERS = 3
_FAULTS_END_S = 60.0
_END_S = 80.0
_SEND_S = 0.02
_TIMEOUT_S = DURATION_S / _RENEWALS
_STATE_SHARE = 0.2
"""Share of the turns in which a leader sends its state again."""
_DRIFT = 0.04
"""Maximum deviation of a clock's speed; two clocks together deviate less than the margin of a tenure."""


class BrokenPromiseError(AssertionError):
    """A promise was broken; the message names it."""


@dataclass(slots=True)
class Store:
    """Model of the store."""

    rate: float
    """Speed of its clock."""
    lease: int = 0
    """Id of the lease that is held; 0 for none."""
    holder: int = -1
    ends_at: float = 0.0
    number: int = 0
    leases: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def expire(self, now: float) -> None:
        if self.lease and now >= self.ends_at:
            self.lease, self.holder = 0, -1

    def acquire(self, holder: int, highest: int, now: float) -> tuple[int, int]:
        """Return (number, lease) of the new holder, or (0, 0)."""
        self.expire(now)
        if self.lease:
            return 0, 0
        self.number = tenure.next_number(self.number, highest, 1 + int(1000 * now))
        self.lease, self.holder = next(self.leases), holder
        self.ends_at = now + DURATION_S / self.rate
        return self.number, self.lease

    def renew(self, lease: int, now: float) -> bool:
        self.expire(now)
        if lease != self.lease:
            return False
        self.ends_at = now + DURATION_S / self.rate
        return True

    def revoke(self, lease: int, now: float) -> int:
        """End a lease by its id; return the holder whose lease was ended, or -1."""
        self.expire(now)
        if lease != self.lease:
            return -1
        holder, self.lease, self.holder = self.holder, 0, -1
        return holder


@dataclass(slots=True)
class Process:
    """A scheduler's process."""

    index: int
    rate: float
    offset: float
    tenure: Tenure = field(default_factory=lambda: Tenure(DURATION_S))
    lease: int = 0
    highest: int = 0
    """Highest leader number that it knows."""
    generation: int = 0
    """Increases when the process is killed; events of earlier generations have no effect."""
    is_stopped: bool = False
    is_dead: bool = False
    reaches_store: bool = True
    reaches_frontend: bool = True
    position: int = -1
    """Next token of the stream; -1 while the front end has not submitted it to this process."""
    connection: int = 0
    """Number of the connection to the front end. A cut network breaks the connection, and TCP retains the order."""
    arrives_at: float = 0.0
    """Arrival time of the last frame."""
    held_back: list[Callable[[], None]] = field(default_factory=list)
    """What the process does when it continues after SIGSTOP."""

    def clock(self, now: float) -> float:
        return now * self.rate + self.offset


class World:
    """One simulation."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.store = Store(rate=self._speed())
        self.processes = [
            Process(index, rate=self._speed(), offset=self.rng.uniform(-1e6, 1e6)) for index in range(_NUM_SCHEDULERS)
        ]
        self.schedulers = Schedulers(",".join(f"tcp://{index}:1" for index in range(_NUM_SCHEDULERS)))
        self.chosen = (-1, -1, -1)
        """(process, leader number, connection) of the scheduler that the front end has chosen."""
        self.tokens = 0
        """Number of tokens that the front end has accepted."""
        self.numbers: list[int] = []
        self.takeovers = 0

    def run(self) -> int:
        """Run to the end; return the number of takeovers.

        Raises:
            BrokenPromiseError: a promise was broken.
        """
        for process in self.processes:
            self._begin(process)
        self._later(self.rng.uniform(1, 3), self._fault)
        self._later(_FAULTS_END_S, self._mend)
        while self._events and self._events[0][0] < _END_S:
            self.now, _, event = heapq.heappop(self._events)
            event()
        if not any(self._may_send(process) for process in self.processes):
            raise BrokenPromiseError("liveness: no scheduler leads at the end")
        return self.takeovers

    # ---------------------------------------------------------------- processes

    def _speed(self) -> float:
        return 1 + self.rng.uniform(-_DRIFT, _DRIFT)

    def _later(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), event))

    def _delay(self) -> float:
        return self.rng.choice([0.001, 0.01, 0.1]) * self.rng.random()

    def _do(self, process: Process, delay: float, what: Callable[[], None]) -> None:
        """Let a process do something later, unless it was killed; when it is stopped, it does so when it continues."""
        generation = process.generation

        def event() -> None:
            if process.generation != generation or process.is_dead:
                return
            if process.is_stopped:
                process.held_back.append(event)
            else:
                what()

        self._later(delay, event)

    def _begin(self, process: Process) -> None:
        process.tenure, process.lease, process.position = Tenure(DURATION_S), 0, -1
        self._do(process, _TIMEOUT_S * self.rng.random(), lambda: self._renew(process))

    def _may_send(self, process: Process) -> bool:
        return not process.is_dead and process.tenure.may_send(process.clock(self.now))

    def _renew(self, process: Process) -> None:
        """Send a request to the store: to renew the lease, or to acquire it."""
        requested_at, lease = process.clock(self.now), process.lease
        self._do(process, _TIMEOUT_S, lambda: self._renew(process))
        if not process.reaches_store:
            return

        def at_store() -> None:
            if lease:
                renewed = self.store.renew(lease, self.now)
                self._respond(process, lambda: self._renewed(process, lease, requested_at, renewed))
                return
            number, fresh = self.store.acquire(process.index, process.highest, self.now)
            if number:
                if self.numbers and number <= self.numbers[-1]:
                    raise BrokenPromiseError(f"number: {number} after {self.numbers[-1]}")
                self.numbers.append(number)
                self._respond(process, lambda: self._acquired(process, number, fresh, requested_at))

        self._later(self._delay(), at_store)

    def _respond(self, process: Process, what: Callable[[], None]) -> None:
        if process.reaches_store:
            self._do(process, self._delay(), what)

    def _renewed(self, process: Process, lease: int, requested_at: float, renewed: bool) -> None:
        if process.lease != lease:
            return
        if renewed:
            process.tenure.renewed(requested_at)
        else:
            process.tenure.lost()
            self._step_down(process)

    def _acquired(self, process: Process, number: int, lease: int, requested_at: float) -> None:
        if process.lease:
            return  # A response that comes too late; the lease ends by itself.
        process.tenure.acquired(number, requested_at)
        process.lease, process.highest = lease, number
        self.takeovers += 1
        self._check_one()
        self._turn(process)

    def _step_down(self, process: Process) -> None:
        process.tenure, process.lease, process.position = Tenure(DURATION_S), 0, -1

    def _turn(self, process: Process) -> None:
        """Run a turn of a leader: check the lease, and send the next token or the state."""
        if not process.lease:
            return
        if not process.tenure.may_send(process.clock(self.now)):
            self._step_down(process)
            return
        self._check_one()
        number, position, connection = process.tenure.number, process.position, process.connection
        if position >= 0 and self.rng.random() < _STATE_SHARE:
            position = -1
        elif position >= 0:
            process.position += 1
        # The process may be stopped between the check and the send.
        self._do(process, 0.0005, lambda: self._send(process, number, position, connection))
        self._do(process, _SEND_S, lambda: self._turn(process))

    def _check_one(self) -> None:
        leading = [each.index for each in self.processes if not each.is_stopped and self._may_send(each)]
        if len(leading) > 1:
            raise BrokenPromiseError(f"one: schedulers {leading} may send at {self.now:.3f} s")

    # ---------------------------------------------------------------- front end

    def _send(self, process: Process, number: int, position: int, connection: int) -> None:
        if process.reaches_frontend and connection == process.connection:
            process.arrives_at = max(process.arrives_at, self.now + self._delay())
            self._later(process.arrives_at - self.now, lambda: self._arrive(process, number, position, connection))

    def _arrive(self, process: Process, number: int, position: int, connection: int) -> None:
        sender = (process.index, number, connection)
        if position >= 0:
            if sender == self.chosen:
                if position > self.tokens:
                    raise BrokenPromiseError(f"stream: token {position} after {self.tokens} tokens")
                self.tokens += position == self.tokens
            return
        # The state, in response to a Hello to all addresses. The front end then submits its stream.
        if sender != self.chosen and self.schedulers.accepts(number):
            if number < self.chosen[1]:
                raise BrokenPromiseError(f"fenced: accepted {number} after {self.chosen[1]}")
            self.chosen, tokens = sender, self.tokens
            self._do(process, self._delay(), lambda: self._submit(process, sender, tokens))

    def _submit(self, process: Process, sender: tuple[int, int, int], tokens: int) -> None:
        if process.lease and sender == (process.index, process.tenure.number, process.connection):
            process.position = tokens

    # ---------------------------------------------------------------- faults

    def _fault(self) -> None:
        if self.now > _FAULTS_END_S:
            return
        process = self.rng.choice(self.processes)
        leading = [each for each in self.processes if each.lease and not each.is_dead]
        if leading and self.rng.random() < 0.7:
            process = self.rng.choice(leading)
        length = self.rng.choice([0.3, 2.0, 5.0]) * self.rng.random()
        match self.rng.randrange(4):
            case 0:
                self._kill(process)
                self._later(length, lambda: self._restart(process))
            case 1:
                process.is_stopped = True
                self._later(length, lambda: self._continue(process))
            case 2:
                process.reaches_store = False
                self._later(length, lambda: setattr(process, "reaches_store", True))
            case 3:
                process.reaches_store = process.reaches_frontend = False
                self._disconnect(process)
                self._later(length, lambda: self._reach(process))
        self._later(self.rng.uniform(0.1, 4), self._fault)

    def _disconnect(self, process: Process) -> None:
        process.connection += 1
        process.position = -1

    def _kill(self, process: Process) -> None:
        process.is_dead = True
        process.generation += 1
        process.held_back.clear()
        self._disconnect(process)
        token = process.lease
        if token and process.reaches_store and self.rng.random() < 0.8:
            # Its guard revokes the lease, perhaps only after the lease has ended and others have led.
            self._later(self.rng.choice([0.01, 3.0]) * self.rng.random(), lambda: self._guard(process, token))

    def _guard(self, process: Process, token: int) -> None:
        ended = self.store.revoke(token, self.now)
        holder = self.processes[ended] if ended >= 0 else None
        if holder is not None and (holder is not process or (holder.lease and not holder.is_dead)):
            raise BrokenPromiseError(f"guard: the lease of scheduler {ended} was revoked, which is alive")

    def _restart(self, process: Process) -> None:
        if process.is_dead:
            process.is_dead = process.is_stopped = False
            self._begin(process)

    def _continue(self, process: Process) -> None:
        process.is_stopped = False
        held_back, process.held_back = process.held_back, []
        for each in held_back:
            self._later(0.0, each)

    def _reach(self, process: Process) -> None:
        process.reaches_store = process.reaches_frontend = True

    def _mend(self) -> None:
        for process in self.processes:
            self._reach(process)
            self._continue(process)
            self._restart(process)


def main() -> int:
    """Run simulations with consecutive seeds."""
    parser = argparse.ArgumentParser(prog="python -m checks.sim.leadership", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=100, help="number of simulations")
    options = parser.parse_args()
    takeovers = failures = 0
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            takeovers += World(seed).run()
        except BrokenPromiseError as error:
            failures += 1
            print(f"seed={seed} {error}")
    print(f"simulations={options.seeds} takeovers={takeovers} failures={failures}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
