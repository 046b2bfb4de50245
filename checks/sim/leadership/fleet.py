"""Workers in the simulation of leases, and the leader's plans for one stream."""

import itertools
from collections.abc import Callable

from checks.sim.leadership.events import BrokenPromiseError, Events
from checks.sim.leadership.models import Lead, Plan, Process, Session, Token, Tokens, Worker, common_length

_LOST_AFTER_S = 0.8


class Fleet:
    """All workers.

    Args:
        events: time and network.
        processes: the schedulers.
        workers: the workers.
        may_send: returns whether a scheduler may send now.
    """

    def __init__(
        self,
        events: Events,
        processes: list[Process],
        workers: list[Worker],
        may_send: Callable[[Process], bool],
    ) -> None:
        self._events, self._processes, self.workers, self._may_send = events, processes, workers, may_send
        self._by_index = {worker.index: worker for worker in workers}
        self._numbers = itertools.count(1)
        self.computed_again = 0
        """Number of tokens whose KV was computed again."""

    # ---------------------------------------------------------------- leader

    def welcomes(self, process: Process) -> list[Callable[[], None]]:
        """Return the responses of a leader to the Hello of each worker."""
        return [self._welcome(process, worker) for worker in self.workers]

    def _welcome(self, process: Process, worker: Worker) -> Callable[[], None]:
        session = self.session(process, worker)
        return lambda: self._events.transmit(process, worker, lambda: self._join(worker, process, session))

    def session(self, process: Process, worker: Worker) -> Session:
        return Session(process.index, process.tenure.number, (process.connection, worker.connection))

    def plan(self, process: Process, lead: Lead) -> Callable[[], None] | None:
        """Return a function that sends the leader's next step of the stream; None if no step is due."""
        if lead.plan is not None or not lead.workers:
            return None
        if lead.assigned not in lead.workers:
            lead.assigned = max(lead.workers, key=lambda index: _kept(lead, index))
        session, _ = lead.workers[lead.assigned]
        kept = _kept(lead, lead.assigned)
        plan = lead.plan = Plan(lead.attempt, len(lead.log), kept, tuple(lead.log[kept:]))
        lead.workers[lead.assigned] = session, lead.log
        worker = self._by_index[lead.assigned]
        return lambda: self._events.transmit(process, worker, lambda: self._take(worker, session, plan))

    def _joined(self, process: Process, worker: Worker, session: Session, row: Tokens) -> None:
        lead = process.lead
        if lead is not None and session == self.session(process, worker):
            if worker.index in lead.workers:
                self._lose(process, worker, lead.workers[worker.index][0])
            lead.workers[worker.index] = session, row

    def _result(self, process: Process, worker: Worker, session: Session, plan: Plan, token: Token) -> None:
        lead = process.lead
        if lead is None or worker.index not in lead.workers or lead.workers[worker.index][0] != session:
            return
        if lead.plan is not plan or plan.attempt != lead.attempt:
            return
        lead.plan = None
        lead.log.append(token)
        lead.journal.append(plan.position, (token,))
        lead.positions.append(lead.journal.written)
        lead.times.append(self._events.now)
        lead.workers[worker.index] = session, lead.log

    def _lose(self, process: Process, worker: Worker, session: Session) -> None:
        lead = process.lead
        if lead is None or worker.index not in lead.workers or lead.workers[worker.index][0] != session:
            return
        del lead.workers[worker.index]
        if lead.assigned == worker.index:
            lead.assigned, lead.plan = -1, None

    # ---------------------------------------------------------------- worker

    def disconnect(self, worker: Worker) -> None:
        """Break the connection of a worker. Its leader detects this some time later."""
        process = self._processes[worker.session.process]
        session = worker.session
        worker.connection += 1
        delay = _LOST_AFTER_S * self._events.rng.random()
        self._events.do(process, delay, lambda: self._lose(process, worker, session))

    def kill(self, worker: Worker) -> None:
        self.disconnect(worker)
        worker.generation += 1
        worker.held_back.clear()
        worker.row, worker.running = [], None
        worker.waiting.clear()

    def _join(self, worker: Worker, process: Process, session: Session) -> None:
        if worker.session == session or not worker.schedulers.accepts(session.number):
            return
        if session.number < worker.session.number:
            raise BrokenPromiseError(f"joined: worker {worker.index} {session.number} after {worker.session.number}")
        worker.session = session
        row = list(worker.row)
        self._events.transmit(worker, process, lambda: self._joined(process, worker, session, row))

    def _take(self, worker: Worker, session: Session, plan: Plan) -> None:
        """Run a step after the one that is in progress."""
        worker.waiting.append((session, plan))
        if worker.running is None:
            self._start(worker)

    def _start(self, worker: Worker) -> None:
        while worker.waiting:
            session, plan = worker.waiting.popleft()
            if session == worker.session == self.session(self._processes[session.process], worker):
                break
        else:
            return
        self.computed_again += len(plan.tokens)
        worker.row = worker.row[: plan.kept] + list(plan.tokens)
        worker.running = session, plan
        self._check_twice(worker, plan)
        step_s = self._events.rng.uniform(0.01, 0.03) + 0.0005 * len(plan.tokens)
        self._events.do(worker, step_s, lambda: self._finish(worker, session, plan))

    def _finish(self, worker: Worker, session: Session, plan: Plan) -> None:
        token = Token(next(self._numbers), worker.row[-1].number if worker.row else 0)
        worker.row.append(token)
        worker.running = None
        if worker.session == session:
            process = self._processes[session.process]
            self._events.transmit(worker, process, lambda: self._result(process, worker, session, plan, token))
        self._start(worker)

    def _check_twice(self, worker: Worker, plan: Plan) -> None:
        valid = [each for each in self.workers if self._runs(each, plan.position)]
        if len(valid) > 1 and worker in valid:
            names = [each.index for each in valid]
            raise BrokenPromiseError(f"twice: workers {names} compute position {plan.position}")

    def _runs(self, worker: Worker, position: int) -> bool:
        """Return whether a worker computes a position for a scheduler that may send."""
        if worker.running is None or worker.running[1].position != position:
            return False
        session = worker.running[0]
        process = self._processes[session.process]
        return session == self.session(process, worker) and self._may_send(process)


def _kept(lead: Lead, index: int) -> int:
    """Return the number of tokens whose KV a worker has."""
    row = lead.workers[index][1]
    return len(row) if row is lead.log else common_length(row, lead.log)
