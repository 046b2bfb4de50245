"""One simulation of leases: the store, leaders, the front end and faults."""

from collections.abc import Callable
from functools import partial

from checks.sim.leadership.events import BrokenPromiseError, Events
from checks.sim.leadership.fleet import Fleet
from checks.sim.leadership.models import (
    DURATION_S,
    NO_SESSION,
    Journal,
    Lead,
    Node,
    Process,
    Session,
    Store,
    Token,
    Tokens,
    Worker,
)
from checks.sim.leadership.replication import GRACE_S, Replication
from scheduler_svc.standby.cursor import replicated
from scheduler_svc.standby.tenure import Tenure
from shared.schedulers import Schedulers

_RENEWALS = 5
_NUM_SCHEDULERS = 3
_NUM_WORKERS = 2
_FAULTS_END_S = 60.0
_END_S = 80.0
_TURN_S = 0.02
_TIMEOUT_S = DURATION_S / _RENEWALS
_STATE_SHARE = 0.2
"""Share of the turns in which a leader sends its state again."""
_DRIFT = 0.04
"""Maximum deviation of a clock's speed; two clocks together deviate less than the margin of a tenure."""
_SETTLED_S = 3.0
"""Time after a fault until a standby has caught up."""
_HELD_S = 2.5
"""Maximum time for which a standby delays a token."""
_STEADY_S = 3.0
"""Time after which a leader and a worker without faults serve."""


class World:
    """One simulation."""

    def __init__(self, seed: int) -> None:
        self.events = Events(seed)
        self.rng = self.events.rng
        self.store = Store(rate=self._speed())
        self.processes = [
            Process(index, rate=self._speed(), offset=self.rng.uniform(-1e6, 1e6)) for index in range(_NUM_SCHEDULERS)
        ]
        workers = [Worker(_NUM_SCHEDULERS + index) for index in range(_NUM_WORKERS)]
        self.fleet = Fleet(self.events, self.processes, workers, self._may_send)
        self.replication = Replication(self.events, self.processes, self._step_down)
        self.schedulers = Schedulers(",".join(f"tcp://{index}:1" for index in range(_NUM_SCHEDULERS)))
        self.chosen = NO_SESSION
        """Session of the front end."""
        self.accepted: Tokens = []
        """Tokens that the front end has accepted."""
        self.numbers: list[int] = []
        self.takeovers = 0
        self.filled = 0
        """Number of tokens that a leader did not know before the front end submitted them."""
        self._arrivals: dict[int, float] = {}
        self._accepted_at = 0.0

    def run(self) -> int:
        """Run to the end; return the number of takeovers.

        Raises:
            BrokenPromiseError: a promise was broken.
        """
        for process in self.processes:
            self._begin(process)
        self.events.later(self.rng.uniform(1, 3), self._fault)
        self.events.later(_FAULTS_END_S, self._mend)
        self.events.later(1.0, self._check_progress)
        self.events.run(_END_S)
        leader = next((each for each in self.processes if self._may_send(each)), None)
        if leader is None:
            raise BrokenPromiseError("liveness: no scheduler leads at the end")
        for each in self.processes:
            if each is not leader and (not each.copy.is_complete or each.copy.number != leader.tenure.number):
                raise BrokenPromiseError(f"liveness: scheduler {each.index} does not have the journal at the end")
        return self.takeovers

    # ---------------------------------------------------------------- leases

    def _speed(self) -> float:
        return 1 + self.rng.uniform(-_DRIFT, _DRIFT)

    def _begin(self, process: Process) -> None:
        process.tenure, process.lease, process.lead, process.standing = Tenure(DURATION_S), 0, None, None
        self.replication.begin(process)
        self.events.do(process, _TIMEOUT_S * self.rng.random(), lambda: self._renew(process))

    def _may_send(self, process: Process) -> bool:
        return not process.is_dead and process.tenure.may_send(process.clock(self.events.now))

    def _renew(self, process: Process) -> None:
        """Send a request to the store: to renew the lease, or to acquire it."""
        requested_at, lease, highest = process.clock(self.events.now), process.lease, process.standing
        self.events.do(process, _TIMEOUT_S, lambda: self._renew(process))
        if not lease:
            if highest is None:
                return
            self._check_whole(process)
        if not process.reaches_store:
            return

        def at_store() -> None:
            if lease:
                renewed = self.store.renew(lease, self.events.now)
                self._respond(process, lambda: self._renewed(process, lease, requested_at, renewed))
                return
            number, fresh = self.store.acquire(process.index, highest or 0, self.events.now)
            if number:
                if self.numbers and number <= self.numbers[-1]:
                    raise BrokenPromiseError(f"number: {number} after {self.numbers[-1]}")
                self.numbers.append(number)
                self._respond(process, lambda: self._acquired(process, number, fresh, requested_at))

        self.events.later(self.events.delay(), at_store)

    def _respond(self, process: Process, what: Callable[[], None]) -> None:
        if process.reaches_store:
            self.events.do(process, self.events.delay(), what)

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
        process.lease = lease
        process.lead = self._lead(process)
        process.numbers = process.numbers.led(number)
        self.takeovers += 1
        self._check_one()
        if self.rng.random() < 0.1:
            self._fault_on(process)
        self.events.do(process, 0.0, lambda: self._turn(process), is_turn=True)

    def _lead(self, process: Process) -> Lead:
        copy, log = process.copy, list(process.copy.tokens)
        calm_s = self.events.now - process.undisturbed_since
        if self.chosen != NO_SESSION:
            last = self.processes[self.chosen.process]
            calm_s = min(calm_s, last.calm_s if last.num_faults else self.events.now - last.undisturbed_since)
        lead = Lead(Journal(log), log, since=self.events.now)
        lead.is_promised = calm_s >= _SETTLED_S and copy.is_complete and copy.number == self.chosen.number
        return lead

    def _step_down(self, process: Process) -> None:
        """Stop leading, and become a standby. The journal of the leadership is in its folder."""
        if process.lead is not None:
            process.copy.tokens = process.lead.log
        process.tenure, process.lease, process.lead, process.standing = Tenure(DURATION_S), 0, None, None
        process.copy.restart()
        process.leader, process.heard_at = -1, process.clock(self.events.now)

    # ---------------------------------------------------------------- leader

    def _turn(self, process: Process) -> None:
        """Run a turn of a leader: check the lease, and send plans, parts of the journal and tokens."""
        lead = process.lead
        if lead is None:
            return
        if not process.tenure.may_send(process.clock(self.events.now)):
            self._step_down(process)
            return
        self._check_one()
        session = self._session(process)
        sends: list[Callable[[], None]] = []
        if self.rng.random() < _STATE_SHARE:
            sends.append(lambda: self._send(process, session, None))
            sends += self.fleet.welcomes(process)
        if lead.submission == session and (plan := self.fleet.plan(process, lead)) is not None:
            sends.append(plan)
        sends += self.replication.to_send(process, lead)
        durable = replicated(lead.replicas.values())
        while lead.submission == session and lead.sent < len(lead.log) and lead.positions[lead.sent] <= durable:
            sends.append(self._token(process, session, lead.sent, lead.log[lead.sent]))
            lead.sent += 1
        # The process may be stopped between the check and the send.
        self.events.do(process, 0.0005, lambda: [send() for send in sends])
        self.events.do(process, _TURN_S, lambda: self._turn(process), is_turn=True)

    def _token(self, process: Process, session: Session, position: int, token: Token) -> Callable[[], None]:
        return lambda: self._send(process, session, (position, token))

    def _session(self, process: Process) -> Session:
        return Session(process.index, process.tenure.number, (process.connection, 0))

    def _check_one(self) -> None:
        leading = [each.index for each in self.processes if not each.is_stopped and self._may_send(each)]
        if len(leading) > 1:
            raise BrokenPromiseError(f"one: schedulers {leading} may send at {self.events.now:.3f} s")

    def _check_whole(self, process: Process) -> None:
        is_whole = process.copy.is_complete and process.copy.number == process.numbers.highest
        silence_s = process.clock(self.events.now) - process.heard_at
        if not is_whole and process.numbers.own != process.numbers.highest and silence_s <= GRACE_S:
            raise BrokenPromiseError(
                f"whole: scheduler {process.index} stands without the whole journal {silence_s:.3f} s after its leader"
            )

    # ---------------------------------------------------------------- front end

    def _send(self, process: Process, session: Session, token: tuple[int, Token] | None) -> None:
        if process.reaches_others and session.connections[0] == process.connection:
            arrives_at = max(self._arrivals.get(process.index, 0.0), self.events.now + self.events.delay())
            self._arrivals[process.index] = arrives_at
            self.events.later(arrives_at - self.events.now, lambda: self._arrive(process, session, token))

    def _arrive(self, process: Process, session: Session, token: tuple[int, Token] | None) -> None:
        if token is not None:
            if session == self.chosen:
                self._accept(*token)
            return
        # The state, in response to a Hello to all addresses. The front end then submits its stream.
        if session != self.chosen and self.schedulers.accepts(session.number):
            if session.number < self.chosen.number:
                raise BrokenPromiseError(f"fenced: accepted {session.number} after {self.chosen.number}")
            self.chosen, tokens = session, list(self.accepted)
            self.events.do(process, self.events.delay(), lambda: self._submit(process, session, tokens))

    def _accept(self, position: int, token: Token) -> None:
        if position != len(self.accepted):
            raise BrokenPromiseError(f"stream: token {position} after {len(self.accepted)} tokens")
        if token.parent != (self.accepted[-1].number if self.accepted else 0):
            raise BrokenPromiseError(f"stream: token {position} was computed after other tokens")
        self.accepted.append(token)
        self._accepted_at = self.events.now

    def _submit(self, process: Process, session: Session, tokens: Tokens) -> None:
        lead = process.lead
        if lead is None or session != self._session(process):
            return
        if lead.submission == NO_SESSION:
            self.filled += max(0, len(tokens) - len(lead.log))
            if lead.is_promised and lead.log[: len(tokens)] != tokens:
                raise BrokenPromiseError(
                    f"tail: scheduler {process.index} has {len(lead.log)} tokens of {len(tokens)} that were delivered"
                )
        lead.submission, lead.attempt, lead.plan = session, lead.attempt + 1, None
        lead.log = list(tokens)
        lead.journal.rewrite(lead.log)
        lead.positions, lead.times, lead.sent = [0] * len(tokens), [self.events.now] * len(tokens), len(tokens)

    def _check_progress(self) -> None:
        self.events.later(0.5, self._check_progress)
        now = self.events.now
        leader = next((each for each in self.processes if self._may_send(each)), None)
        if leader is None or leader.lead is None:
            return
        lead, workers = leader.lead, max(each.undisturbed_since for each in self.fleet.workers)
        steady_since = max(lead.since, leader.undisturbed_since, workers)
        if now - max(steady_since, self._accepted_at) > _STEADY_S + _HELD_S:
            raise BrokenPromiseError(f"progress: no token since {self._accepted_at:.3f} s at {now:.3f} s")
        if now - steady_since > _STEADY_S and lead.submission == self._session(leader) and lead.sent < len(lead.log):
            held_s = now - lead.times[lead.sent]
            if held_s > _HELD_S:
                raise BrokenPromiseError(f"progress: token {lead.sent} waits for standbys since {held_s:.3f} s")

    # ---------------------------------------------------------------- faults

    def _fault(self) -> None:
        if self.events.now > _FAULTS_END_S:
            return
        process = self.rng.choice(self.processes)
        leading = [each for each in self.processes if each.lease and not each.is_dead]
        if leading and self.rng.random() < 0.6:
            process = self.rng.choice(leading)
        if leading and self.rng.random() < 0.1:
            self._lose_tail(leading[0])
        elif self.rng.random() < 0.2:
            self._fault_on_worker(self.rng.choice(self.fleet.workers))
        else:
            self._fault_on(process)
        self.events.later(self.rng.uniform(0.1, 4), self._fault)

    def _disturb(self, node: Node, end: Callable[[], object] | None = None, *, length: float | None = None) -> None:
        """Begin a fault that ends after a time, which is random by default."""
        if not node.num_faults:
            node.calm_s = self.events.now - node.undisturbed_since
        node.num_faults += 1
        node.undisturbed_since = float("inf")

        def calm() -> None:
            if end is not None:
                end()
            node.num_faults -= 1
            if not node.num_faults:
                node.undisturbed_since = self.events.now

        self.events.later(length or self.rng.choice([0.3, 2.0, 5.0]) * self.rng.random(), calm)

    def _fault_on(self, process: Process) -> None:
        match self.rng.randrange(6):
            case 0:
                self._kill_for_now(process)
            case 1:
                process.is_stopped = True
                self._disturb(process, partial(self.events.resume, process))
            case 2:
                process.reaches_store = False
                self._disturb(process, partial(setattr, process, "reaches_store", True))
            case 3:
                process.reaches_store = process.reaches_others = False
                self._disconnect(process)
                self._disturb(process, partial(self._reach, process))
            case 4:
                process.slow_s = self.rng.choice([0.05, 0.5, 2.0])
                self._disturb(process, partial(setattr, process, "slow_s", 0.0))
            case _:
                self._disconnect(process)
                self._disturb(process)

    def _lose_tail(self, leader: Process) -> None:
        """Make all standbys slow, and kill the leader when it does not wait for them any more."""
        for each in self.processes:
            if each is not leader:
                each.slow_s = 2.0
                self._disturb(each, partial(setattr, each, "slow_s", 0.0), length=5.0)
        self.events.later(self.rng.uniform(1.5, 3.0), lambda: self._kill_for_now(leader))

    def _kill_for_now(self, process: Process) -> None:
        if not process.is_dead:
            self._kill(process)
            self._disturb(process, partial(self._restart, process))

    def _fault_on_worker(self, worker: Worker) -> None:
        match self.rng.randrange(3):
            case 0:
                worker.is_stopped = True
                self._disturb(worker, partial(self.events.resume, worker))
            case 1:
                self.fleet.kill(worker)
                self._disturb(worker)
            case _:
                self.fleet.disconnect(worker)
                self._disturb(worker)

    def _disconnect(self, process: Process) -> None:
        process.connection += 1
        if process.lead is not None:
            process.lead.workers.clear()
            process.lead.assigned, process.lead.plan = -1, None

    def _kill(self, process: Process) -> None:
        process.is_dead = True
        process.generation += 1
        process.held_back.clear()
        self._disconnect(process)
        if process.lead is not None:
            process.copy.tokens, process.lead = process.lead.log, None
        token = process.lease
        if token and process.reaches_store and self.rng.random() < 0.8:
            # Its guard revokes the lease, perhaps only after the lease has ended and others have led.
            self.events.later(self.rng.choice([0.01, 3.0]) * self.rng.random(), lambda: self._guard(process, token))

    def _guard(self, process: Process, token: int) -> None:
        ended = self.store.revoke(token, self.events.now)
        holder = self.processes[ended] if ended >= 0 else None
        if holder is not None and (holder is not process or (holder.lease and not holder.is_dead)):
            raise BrokenPromiseError(f"guard: the lease of scheduler {ended} was revoked, which is alive")

    def _restart(self, process: Process) -> None:
        if process.is_dead:
            process.is_dead = process.is_stopped = False
            self._begin(process)

    def _reach(self, process: Process) -> None:
        process.reaches_store = process.reaches_others = True

    def _mend(self) -> None:
        for process in self.processes:
            self._reach(process)
            self.events.resume(process)
            self._restart(process)
        for worker in self.fleet.workers:
            self.events.resume(worker)
